"""Round metrics."""

from __future__ import annotations

from hypha.accelerate_executor.diloco.metrics import RoundTally


def test_the_mean_loss_is_weighted_by_samples() -> None:
    tally = RoundTally()
    tally.add(1.0, 30, 0.5)
    tally.add(4.0, 10, 0.5)
    assert tally.metrics(2).metrics == {"loss": 1.75, "samples": 40.0, "batches": 2.0, "samples_per_second": 40.0}
    assert RoundTally().metrics(1).metrics["loss"] == 0.0
