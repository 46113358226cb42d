"""Faults during inference jobs on a real network: every row gets one result, as `hypha-scheduler audit` proves.

Parts that are cut, corrupt, of another slice or sent twice are faults of workers that no real one has: see
``test_inference_job.py`` of the scheduler.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.inference_network import DEADLY, ROWS, SLICES, InferenceNetwork, inference_network
from support.task_network import Submission
from support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

IN_HAND = 2
"""Slices that an executor has at a time."""
A_SLICE = ROWS // SLICES


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with inference_network(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: InferenceNetwork) -> Iterator[None]:
    yield
    network.poison.unlink(missing_ok=True)
    network.hold.unlink(missing_ok=True)
    network.revive()
    network.check_quiet()


def wait_for_parts(job: Submission, count: int, timeout: float = 60.0) -> None:
    """Wait until so many parts are committed; fail if the job ends first."""

    def enough() -> bool:
        assert job.process.poll() is None, job.process.communicate()
        return len(job.records("part")) >= count

    wait_until(enough, timeout, f"{count} parts")


def a_worker_of(network: InferenceNetwork, job: Submission) -> str:
    """Wait for a part; return the name of the worker that sent it."""
    wait_for_parts(job, 1)
    wait_until(lambda: bool(job.events("part")), 60, "the event of a part")
    return network.worker_of(job.events("part")[0]["worker"])


@pytest.mark.gate
def test_a_killed_worker_costs_what_it_had_in_hand(network: InferenceNetwork) -> None:
    job = network.classify(num_workers=3)
    name = a_worker_of(network, job)
    wait_for_parts(job, SLICES * 4 // 10)
    network.kill(name)
    summary = job.wait(90)
    network.check(job)
    assert summary["rows_assigned"] <= ROWS + IN_HAND * A_SLICE
    assert len(job.events("worker_lost")) == 1


def test_a_job_whose_scheduler_was_killed_is_resumed(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    network.hold.touch()
    network.kill("scheduler")
    network.hold.unlink()
    assert job.process.wait(60) == 3
    committed = [record["slice"] for record in job.records("part")]
    assert len(committed) < SLICES
    summary = network.resume(job).wait(90)
    network.check(job)
    assert [record["slice"] for record in job.records("part")][: len(committed)] == committed
    assert summary["rows"] == ROWS
    assert summary["rows_assigned"] <= ROWS - (len(committed) - IN_HAND) * A_SLICE


def test_an_executor_that_dies_of_one_row_fails_the_job_which_is_resumed(network: InferenceNetwork) -> None:
    network.poison.touch()
    job = network.classify()
    why = job.wait_for_failure(120)
    assert f"exit code {-signal.SIGKILL}" in why
    network.poison.unlink()
    network.resume(job).wait(60)
    network.check(job)
    [index] = [row["slice"] for row in network.rows(job) if row["number"] == DEADLY]
    assert f"slice {index} " in why
