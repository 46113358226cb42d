"""Faults during a job on a real network: it goes on, and no process is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.local_network import Job, LocalNetwork, local_network
from support.member_faults import CONTINUED, PAUSED, await_record, cut_last_record, refusal_of
from support.numpy_executor import executor_toml, write_model
from support.process_ready import is_alive
from support.proof import check_rounds, check_whole_epochs, prove
from support.waiting import wait_until

from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

SMALL = executor_toml("numpy", delay=0.02)
"""Takes 0.02 s and more for a batch, about a second for a round."""
ROUNDS = 8
"""Rounds of a job with the small executor."""
GRACE = 2.0
"""Seconds for which workers train on, where a test waits until they do no longer."""
OLD_TERM = {
    ("worker-1", "parameter-server", PSEUDO_GRADIENT): "term: 1 is not 2, the term of this parameter server",
    ("parameter-server", "worker-1", OUTER_UPDATE): "term: 1 is over, the parameter server of term 2 has taken its "
    "place",
    ("parameter-server", "scheduler", OUTER_UPDATE): "term 1 is over: the parameter server is of term 2",
}
"""Why updates of the first term are refused in the second, by sender, receiver and kind."""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with local_network(root, worker_1=SMALL, worker_2=SMALL) as running:
        write_model(root / "small-model", features=64)
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: LocalNetwork) -> Iterator[None]:
    yield
    network.stop_jobs()
    network.revive()
    network.check_quiet()


def small_job(network: LocalNetwork, settings: str = "") -> Job:
    """Start a job with the small executor."""
    model = 'path = "../small-model"'
    return network.job(rounds=ROUNDS, kind="numpy", model=model, settings=settings)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.gate), signal.SIGTERM])
@pytest.mark.processes
def test_a_scheduler_that_is_back_in_time_goes_on_with_its_workers(network: LocalNetwork, how: signal.Signals) -> None:
    """Its executors are the same processes, and compute while it is away."""
    job = small_job(network)
    job.wait_for_round(2)
    executors = {process.pid for process in network.commands()}
    assert len(executors) == len(network.trainers)
    job.child.process.send_signal(how)
    assert job.wait(60) == (-how if how is signal.SIGKILL else 0)
    assert [event["tasks_run_on"] for event in job.events("interrupted")] == [True] * (how is signal.SIGTERM)
    closed = len(job.records("round"))
    assert closed < ROUNDS
    assert {process.pid for process in network.commands()} == executors
    again = network.restart(job.name)
    again.wait_for_round(closed + 1)
    assert {process.pid for process in network.commands()} == executors
    prove(network, again, ROUNDS)
    [resumed] = again.events("resumed")
    assert resumed["adopted"] == len(network.trainers) + 1
    assert again.records("failed") == []


def kill(job: Job) -> None:
    """Kill the scheduler of a job with SIGKILL."""
    job.child.process.kill()
    assert job.wait(60) == -signal.SIGKILL


def resume_without_workers(network: LocalNetwork, job: Job) -> None:
    """Resume a job, whose scheduler was killed, when its workers have given up; check its rounds and terms."""
    wait_until(lambda: not network.executors(), 15 + GRACE, "executors of a scheduler that is gone")
    closed = len(job.records("round"))
    assert closed < ROUNDS
    resumed = network.scheduler_command(job, "resume", "--config", str(network.configuration(job.name)))
    assert resumed.returncode == 0, resumed.stderr
    check_rounds(network, job, ROUNDS)
    terms = {record["round"]: record["term"] for record in job.records("round")}
    assert terms == {number: 1 if number <= closed else 2 for number in range(1, ROUNDS + 1)}


@pytest.mark.processes
def test_a_job_resumes_from_its_record_when_the_workers_have_given_up(network: LocalNetwork) -> None:
    """The last record, which is of the open round, is cut: the one before it counts."""
    job = small_job(network, f"orphan_grace = {GRACE}\n")
    job.wait_for_round(3)
    await_record(job, lambda record: record["record"] == "contributed")
    kill(job)
    assert cut_last_record(job)["record"] != "round"  # one that ends a round is there before its weights are replaced
    resume_without_workers(network, job)


@pytest.mark.gate
@pytest.mark.processes
def test_a_job_waits_for_a_parameter_server_and_goes_on_with_it(network: LocalNetwork) -> None:
    """Its only one is killed and started again: it begins a new term, and updates of the old one are refused."""
    job = small_job(network)
    job.wait_for_round(2)
    executors = {process.pid for process in network.commands()}
    killed = time.time()
    network.kill("parameter-server")
    paused = job.wait_for_event(PAUSED, after=killed)
    assert "parameter server" in paused["reason"]
    closed = len(job.records("round"))
    assert closed < ROUNDS
    network.revive()
    job.wait_for_event(CONTINUED, after=killed)
    job.wait_for_round(closed + 1)
    assert {process.pid for process in network.commands()} == executors
    assert {update: refusal_of(network, job, *update, term=1) for update in OLD_TERM} == OLD_TERM
    prove(network, job, ROUNDS)
    terms = {record["round"]: record["term"] for record in job.records("round")}
    assert terms == {number: 1 if number <= closed else 2 for number in range(1, ROUNDS + 1)}


@pytest.mark.gate
@pytest.mark.processes
def test_a_job_pauses_without_a_killed_worker_and_goes_on_when_it_is_back(network: LocalNetwork) -> None:
    """The executor of the killed worker leaves."""
    job = small_job(network)
    job.wait_for_round(2)
    orphans = psutil.Process(network.processes.child("worker-1").process.pid).children(recursive=True)
    assert orphans
    killed = time.time()
    network.kill("worker-1")
    paused = job.wait_for_event(PAUSED, after=killed)
    assert "1 of at least 2" in paused["reason"]
    wait_until(lambda: not any(map(is_alive, orphans)), 60, "an executor whose worker is gone")
    network.revive()
    job.wait_for_event(CONTINUED, after=killed)
    prove(network, job, ROUNDS)
    check_whole_epochs(job, ROUNDS // 2)


@pytest.mark.gate
def test_a_worker_of_another_authority_is_refused_on_both_sides(network: LocalNetwork) -> None:
    began = len(network.log("gateway"))
    child = network.start_untrusted_worker("untrusted")
    wait_until(lambda: "refused" in child.log.read_text(), 60, "the refusal in the worker's log")
    wait_until(lambda: "refused" in network.log("gateway")[began:], 60, "the refusal in the gateway's log")
    assert child.process.poll() is None  # it keeps trying, because its owner may replace the certificate
    for text in (child.log.read_text(), network.log("gateway")[began:]):
        print(text)
        assert "Traceback" not in text
    child.process.terminate()
    assert child.process.wait(60) == 0
