"""Progress reports and round metrics of an executor; no I/O.

`diloco.loop` updates them after every batch and posts them over `bridge`; the scheduler answers and stores the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypha_proto.progress import BatchDone, RoundMetrics

_MS: float = 1000.0


def batch_done(samples: int, slices: Mapping[str, int], seconds: float) -> BatchDone:
    """Build the report of one batch.

    Args:
        samples: number of samples in it.
        slices: slice index -> samples taken from it; empty if slices have no index.
        seconds: duration without waiting for data and synchronisation.
    """
    return BatchDone(batch_size=samples, slices=dict(slices) or None, batch_ms=seconds * _MS)


@dataclass(slots=True)
class RoundTally:
    """Running sums over the batches of one round."""

    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    """Loss times samples, so that short batches are weighted correctly."""

    def add(self, loss: float, samples: int, seconds: float) -> None:
        """Add one batch: its mean loss, samples and duration in seconds."""
        self.samples += samples
        self.batches += 1
        self.seconds += seconds
        self.loss_sum += loss * samples

    def metrics(self, round_number: int) -> RoundMetrics:
        """Build the round's report: mean loss, samples, batches, samples per second of work."""
        return RoundMetrics(
            round=round_number,
            metrics={
                "loss": self.loss_sum / max(1, self.samples),
                "samples": float(self.samples),
                "batches": float(self.batches),
                "samples_per_second": self.samples / self.seconds if self.seconds > 0 else 0.0,
            },
        )
