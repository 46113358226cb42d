"""Faults during inference jobs on a real network: every row gets one result, as `hypha-scheduler audit` proves.

Parts that are cut, corrupt, of another slice or sent twice are faults of workers that no real one has: see
``test_inference_job.py`` of the scheduler.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.inference_network import DEADLY, ROWS, SLICES, InferenceNetwork, inference_network
from support.task_network import Submission
from support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

IN_HAND = 2
"""Slices that an executor has at a time."""
A_SLICE = ROWS // SLICES
RESUMED_WITHIN = 15.0
"""Seconds from a fault that a job does not survive to its failure."""


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


def parts_of(network: InferenceNetwork, job: Submission, worker: str) -> int:
    """Return how many parts of a worker are committed."""
    peer = network.peer_id(worker)
    return sum(event["worker"] == peer for event in job.events("part"))


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


def test_a_killed_executor_costs_what_it_had_in_hand(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    network.executors()[0].send_signal(signal.SIGKILL)
    summary = job.wait(90)
    network.check(job)
    assert summary["rows_assigned"] <= ROWS + IN_HAND * A_SLICE
    [failed] = job.events("attempt_failed")
    assert f"exit code {-signal.SIGKILL}" in failed["reason"]


def test_a_stopped_executor_is_given_up_and_its_slices_are_computed_by_others(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    first = network.executors()[0]
    stopped = [first, *first.children(recursive=True)]
    for process in stopped:
        process.suspend()
    summary = job.wait(90)
    network.check(job)
    wait_until(lambda: not any(process.is_running() for process in stopped), 60, "the end of the executor")
    assert summary["rows_assigned"] <= ROWS + IN_HAND * A_SLICE
    [lost], [excluded] = job.events("worker_lost"), job.events("worker_excluded")
    assert lost["worker"] == excluded["worker"]
    assert lost["reason"].startswith("its executor has reported nothing for ")


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


def test_a_drained_worker_finishes_its_slice(network: InferenceNetwork) -> None:
    job = network.classify()
    assert network.stop_child(network.processes.child(a_worker_of(network, job))) == 0
    assert job.process.poll() is None
    summary = job.wait(90)
    network.check(job)
    assert summary["rows_assigned"] <= ROWS + A_SLICE
    assert job.events("attempt_failed") == job.events("worker_lost") == []


def test_a_worker_that_was_suspended_for_30_seconds_is_replaced(network: InferenceNetwork) -> None:
    """What it sends afterwards is late; whether it still sends depends on what it notices first."""
    job = network.classify(num_workers=3)
    name = a_worker_of(network, job)
    with network.suspended(name):
        for _ in range(3):
            network.hold.touch()  # so that the job lasts; nobody else is silent for longer than 10 s
            time.sleep(10)
            network.hold.unlink()
            wait_for_parts(job, len(job.records("part")) + 1)
    summary = job.wait(90)
    network.check(job)
    assert [event["worker"] for event in job.events("worker_lost")] == [network.peer_id(name)]
    assert summary["rows_assigned"] <= ROWS + 2 * IN_HAND * A_SLICE


def test_a_worker_that_joins_computes_too(network: InferenceNetwork) -> None:
    network.kill("worker-3")
    job = network.classify(num_workers=1, max_workers=3)
    wait_for_parts(job, 3)
    network.hold.touch()
    network.revive()
    wait_until(lambda: network.is_computing("worker-3", job), 60, "an executor of worker-3")
    network.hold.unlink()
    job.wait(90)
    network.check(job)
    assert parts_of(network, job, "worker-3") > 0


def test_a_data_node_that_is_started_again_costs_time(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    network.kill("data")
    network.revive()
    job.wait(90)
    network.check(job)


def test_a_gateway_that_is_started_again_costs_nothing(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    network.kill("gateway")
    network.revive()
    summary = job.wait(90)
    network.check(job)
    assert summary["rows_assigned"] == ROWS


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


def limit_files(process: psutil.Process, size: int | str) -> None:
    """Let a process write files of at most so many bytes: this stands in for a full disk.

    It is set as the user of the process, since each job of a worker of root has its own; the hard limit stays as it is.

    Raises:
        psutil.NoSuchProcess: If the process has ended, as a short-lived child of a worker may at any time.
    """
    command = ["prlimit", "--pid", str(process.pid), f"--fsize={size}:"]
    try:
        subprocess.run(command, user=process.uids().real, group=process.gids().real, timeout=60, check=True)
    except subprocess.CalledProcessError as error:
        if not process.is_running():
            raise psutil.NoSuchProcess(process.pid) from error
        raise


def test_a_full_disk_at_the_scheduler_fails_the_job_which_is_resumed(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    scheduler = network.process("scheduler")
    began = time.monotonic()
    limit_files(scheduler, 100)
    why = job.wait_for_failure(60)
    seconds = time.monotonic() - began
    print(f"failed {seconds:.1f} s after the disk was full")
    assert seconds < RESUMED_WITHIN
    assert str(job.directory) in why
    limit_files(scheduler, "unlimited")
    network.resume(job).wait(60)
    network.check(job)


def test_a_full_disk_at_a_worker_leaves_the_work_to_others(network: InferenceNetwork) -> None:
    job = network.classify()
    worker = network.process(a_worker_of(network, job))
    limit_files(worker, 100)  # children started from now on inherit the limit
    for process in worker.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            limit_files(process, 100)
    job.wait(90)
    network.check(job)
    limit_files(worker, "unlimited")
