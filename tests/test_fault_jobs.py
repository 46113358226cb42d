"""Faults during a job on a real network: it fails promptly with a clear error, and no process is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.local_network import LocalNetwork, executor, local_network
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MANY = 2000
"""More rounds than any test waits for."""
PROMPTLY = 30.0
"""Seconds within which a job that cannot continue must end."""
BROKEN = executor("broken", "import sys; print('boom'); sys.exit(3)")


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that nobody has waited for has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with local_network(root, worker_1=BROKEN, worker_2=BROKEN) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: LocalNetwork) -> Iterator[None]:
    yield
    network.revive()
    wait_until(lambda: not network.executors(), 15, "the end of all executors")
    for name in network.daemons:
        assert "Traceback" not in network.log(name), network.log(name)


def test_a_killed_executor_ends_the_job_with_its_last_lines(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(2)
    victim = network.commands()[0]
    victim.send_signal(signal.SIGKILL)
    assert job.wait(PROMPTLY) == 1
    assert "was ended by SIGKILL" in job.log
    assert "| INFO hypha.accelerate_executor.diloco.loop: round 1" in job.log
    assert "Traceback" not in job.log
    [failed] = job.events("failed")
    assert "SIGKILL" in failed["error"]


def test_an_executor_that_exits_with_an_error_ends_the_job_with_its_last_lines(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY, kind="broken")
    assert job.wait(PROMPTLY) == 1
    assert "exited with status 3" in job.log
    assert "| boom" in job.log
    assert "Traceback" not in job.log


def test_the_next_job_gets_its_workers_as_soon_as_the_last_has_ended(network: LocalNetwork) -> None:
    placements = []
    for _ in range(3):
        job = network.job(rounds=1)
        assert job.wait(120) == 0, job.log
        placements += [event["seconds"] for event in job.events("placement")]
    assert len(placements) == 3
    assert max(placements) < 5.0  # no lease has to expire first, which would take ten seconds
    assert min(placements[1:]) < 1.0  # the other offer may have arrived late on a busy machine
    for name in network.trainers:
        assert network.log(name).count("executor exited with status 0") >= 3


def test_a_killed_scheduler_costs_its_leases_and_executors(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(1)
    assert len(network.commands()) == len(network.trainers)
    job.child.process.kill()
    assert job.wait(10) == -signal.SIGKILL
    wait_until(lambda: not network.executors(), 15, "executors of a scheduler that is gone")
    after = network.job(rounds=1)
    assert after.wait(90) == 0, after.log


def test_an_interrupted_scheduler_releases_its_workers(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(1)
    job.child.process.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert "Traceback" not in job.log
    wait_until(lambda: not network.executors(), 10, "executors of a scheduler that left")


def test_a_killed_parameter_server_ends_the_job(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(1)
    network.kill("parameter-server")
    assert job.wait(PROMPTLY) == 1
    assert "parameter server" in job.log
    assert "Traceback" not in job.log
    network.revive()
    after = network.job(rounds=1)
    assert after.wait(90) == 0, after.log


def test_a_killed_worker_ends_the_job_and_its_executor_leaves(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(1)
    orphans = psutil.Process(network.processes.child("worker-1").process.pid).children(recursive=True)
    assert orphans
    network.kill("worker-1")
    assert job.wait(PROMPTLY) == 1
    assert "Traceback" not in job.log
    wait_until(lambda: not any(map(is_alive, orphans)), 15, "an executor whose worker is gone")
    network.revive()
    after = network.job(rounds=1)
    assert after.wait(90) == 0, after.log


def test_a_worker_of_another_authority_is_refused_on_both_sides(network: LocalNetwork) -> None:
    began = len(network.log("gateway"))
    child = network.start_untrusted_worker("untrusted")
    wait_until(lambda: "refused" in child.log.read_text(), 20, "the refusal in the worker's log")
    wait_until(lambda: "refused" in network.log("gateway")[began:], 5, "the refusal in the gateway's log")
    time.sleep(1.0)
    assert child.process.poll() is None  # it keeps trying, because its owner may replace the certificate
    for text in (child.log.read_text(), network.log("gateway")[began:]):
        print(text)
        assert "Traceback" not in text
    child.process.terminate()
    assert child.process.wait(10) == 0
