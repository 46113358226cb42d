"""Progress reports and round metrics of an executor; no I/O.

`diloco.loop` updates them after every batch and posts them over `bridge`; the scheduler answers and stores the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypha_proto.training_reports import (
    COMPUTE_SECONDS,
    DATA_WAIT_SECONDS,
    REPORT_WAIT_SECONDS,
    SYNC_SECONDS,
    RoundMetrics,
    TrainedBatch,
)

_MS: float = 1000.0


def trained_batch(samples: int, slices: Mapping[str, int], seconds: float, waited: float) -> TrainedBatch:
    """Describe one batch for its report.

    Args:
        samples: number of samples in it.
        slices: slice index -> samples taken from it; empty if slices have no index.
        seconds: duration without waiting for data, answers and synchronisation.
        waited: seconds of waiting for data before.
    """
    return TrainedBatch(batch_size=samples, slices=dict(slices) or None, batch_ms=seconds * _MS, wait_ms=waited * _MS)


@dataclass(slots=True)
class RoundTally:
    """Running sums over the batches of one round."""

    samples: int = 0
    labelled: int = 0
    """Samples of batches that have a loss."""
    batches: int = 0
    seconds: float = 0.0
    """Seconds of training."""
    loss_sum: float = 0.0
    """Loss times samples, so that short batches are weighted correctly."""
    data_wait: float = 0.0
    """Seconds of waiting for samples."""
    report_wait: float = 0.0
    """Seconds of waiting for answers to reports of batches."""
    sync: float | None = None
    """Seconds from the last batch of the round before; None if this process has trained none."""

    def add(self, loss: float | None, samples: int, seconds: float, waited: float = 0.0) -> None:
        """Add one batch.

        Args:
            loss: its mean loss; None if it has no labels.
            samples: their number.
            seconds: that it took to compute.
            waited: seconds that its data was waited for.
        """
        self.data_wait += waited
        self.samples += samples
        self.batches += 1
        self.seconds += seconds
        if loss is not None:
            self.labelled += samples
            self.loss_sum += loss * samples

    def metrics(self, round_number: int) -> RoundMetrics:
        """Build the round's report: mean loss if any, samples, batches, their rate, and where time went."""
        loss = {"loss": self.loss_sum / self.labelled} if self.labelled else {}
        sync = {} if self.sync is None else {SYNC_SECONDS: self.sync}
        return RoundMetrics(
            round=round_number,
            metrics=loss
            | {
                "samples": float(self.samples),
                "batches": float(self.batches),
                "samples_per_second": self.samples / self.seconds if self.seconds > 0 else 0.0,
                COMPUTE_SECONDS: self.seconds,
                DATA_WAIT_SECONDS: self.data_wait,
                REPORT_WAIT_SECONDS: self.report_wait,
            }
            | sync,
        )
