"""What an executor says about its training, computed from what it saw; pure.

`loop` feeds it after every batch and posts what it makes over `bridge`; the scheduler answers, and keeps the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypha_proto.progress import BatchDone, RoundMetrics

_MS: float = 1000.0


def batch_done(samples: int, slices: Mapping[str, int], seconds: float) -> BatchDone:
    """Report one batch.

    Args:
        samples: how many it had.
        slices: slice index -> how many of them came from it; empty when slices have no index.
        seconds: what it took, waiting for data and synchronisation apart.
    """
    return BatchDone(batch_size=samples, slices=dict(slices) or None, batch_ms=seconds * _MS)


@dataclass(slots=True)
class RoundTally:
    """Sums over the batches of one round."""

    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    """Loss times samples, so that a short batch counts for what it is."""

    def add(self, loss: float, samples: int, seconds: float) -> None:
        """Count one batch: its mean loss, its samples and the seconds it took."""
        self.samples += samples
        self.batches += 1
        self.seconds += seconds
        self.loss_sum += loss * samples

    def metrics(self, round_number: int) -> RoundMetrics:
        """Report the round: mean loss, samples, batches, and samples per second of work."""
        return RoundMetrics(
            round=round_number,
            metrics={
                "loss": self.loss_sum / max(1, self.samples),
                "samples": float(self.samples),
                "batches": float(self.batches),
                "samples_per_second": self.samples / self.seconds if self.seconds > 0 else 0.0,
            },
        )
