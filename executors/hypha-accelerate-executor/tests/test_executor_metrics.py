"""Round metrics."""

from __future__ import annotations

from hypha.accelerate_executor.diloco.metrics import RoundTally
from hypha_proto.progress import ROUND_SECONDS


def test_the_mean_loss_is_weighted_by_samples() -> None:
    tally = RoundTally()
    tally.add(1.0, 30, 0.5)
    tally.add(4.0, 10, 0.25)
    tally.add(None, 10, 0.25)  # has no labels
    expected = {"loss": 1.75, "samples": 50.0, "batches": 3.0, "samples_per_second": 50.0}
    times = {"compute_seconds": 1.0, "data_wait_seconds": 0.0, "report_wait_seconds": 0.0}
    assert tally.metrics(2).metrics == expected | times
    assert "loss" not in RoundTally().metrics(1).metrics


def test_a_round_says_where_its_time_has_gone() -> None:
    tally = RoundTally(report_wait=0.125)
    tally.add(1.0, 8, 0.5, waited=0.25)
    tally.add(1.0, 8, 0.5, waited=0.125)
    found = tally.metrics(1).metrics
    assert {name: value for name, value in found.items() if name in ROUND_SECONDS} == {
        "compute_seconds": 1.0,
        "data_wait_seconds": 0.375,
        "report_wait_seconds": 0.125,
    }
    tally.sync = 2.0
    assert tally.metrics(2).metrics["sync_seconds"] == 2.0
