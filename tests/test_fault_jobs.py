"""Faults during a job on a real network: it goes on, or ends promptly with a clear error, and no process is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.fault_table import FaultRow
from support.liveness import is_alive
from support.local_network import Job, LocalNetwork, executor, local_network
from support.member_faults import CONTINUED, JOINED, PAUSED, RESTARTED, await_record, cut_last_record, refusal_of
from support.numpy_executor import executor_toml, write_model
from support.proof import check_rounds, check_whole_epochs, prove
from support.waiting import wait_until

from hypha_proto.ids import describe_peer
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

MANY = 2000
"""More rounds than any test waits for."""
PROMPTLY = 30.0
"""Seconds within which a job that cannot continue must end."""
BROKEN = executor("broken", "import sys; print('boom'); sys.exit(3)")
INVALID = executor("invalid", "import sys; print('this executor knows no such model'); sys.exit(2)")
SMALL = executor_toml("numpy", delay=0.02)
"""Takes 0.02 s and more for a batch, about a second for a round."""
ROUNDS = 8
"""Rounds of a job with the small executor."""
GRACE = 2.0
"""Seconds for which workers train on, where a test waits until they do no longer."""
LONG_GRACE = 10.0
"""The same, where a scheduler must be back before."""
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
    executors = BROKEN + INVALID + SMALL
    with local_network(root, worker_1=executors, worker_2=executors) as running:
        write_model(root / "small-model", features=64)
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: LocalNetwork) -> Iterator[None]:
    yield
    network.stop_jobs()
    network.revive()
    network.check_quiet()


@pytest.mark.processes
def test_a_killed_executor_is_started_again(network: LocalNetwork, fault_row: FaultRow) -> None:
    """With torch, whose import takes most of the time."""
    rounds = 12
    job = network.job(rounds=rounds)
    job.wait_for_round(2)
    victim, killed = network.commands("worker-1")[0], time.time()
    victim.send_signal(signal.SIGKILL)
    restarted = job.wait_for_event(RESTARTED, after=killed, worker=network.peer_id("worker-1"))
    assert "SIGKILL" in restarted["reason"]
    joined = job.wait_for_event(JOINED, after=killed, worker=network.peer_id("worker-1"))
    assert job.wait(120) == 0, job.log
    assert "Traceback" not in job.log
    last = job.events("round")[-1]
    assert last["round"] == rounds
    assert network.peer_id("worker-1") in last["counts"]
    assert job.events("worker_lost") == []
    audited = network.scheduler_command(job, "audit")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    replayed = network.scheduler_command(
        job, "replay", "--data", str(network.folders.data / "digits"), "--threads", "1"
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    fault_row("an executor with torch is killed", f"trains again after {joined['time'] - killed:.1f} s")


@pytest.mark.processes
def test_the_same_error_on_two_workers_ends_the_job_with_its_last_lines(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY, kind="broken")
    assert job.wait(PROMPTLY) == 1
    assert "exited with status 3" in job.log
    assert "Traceback" not in job.log
    [failed] = job.events("failed")
    assert failed["error"].count("| boom") == 2
    assert all(describe_peer(network.peer_id(name), name) in failed["error"] for name in network.trainers)


@pytest.mark.processes
def test_an_executor_to_which_the_job_is_invalid_ends_it_with_its_last_lines(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY, kind="invalid")
    assert job.wait(PROMPTLY) == 1
    assert "exited with status 2" in job.log
    assert "| this executor knows no such model" in job.log
    assert "Traceback" not in job.log
    assert job.events(RESTARTED) == []


@pytest.mark.processes
def test_the_next_job_gets_its_workers_as_soon_as_the_last_has_ended(network: LocalNetwork) -> None:
    placements = []
    for _ in range(3):
        job = network.job(rounds=1)
        assert job.wait(120) == 0, job.log
        placements += [event["seconds"] for event in job.events("placement")]
    print(*(f"placed after {seconds:.2f} s" for seconds in placements))
    assert len(placements) == 3
    assert max(placements) < 5.0  # no lease has to expire first, which would take ten seconds
    assert min(placements[1:]) < 1.0  # the other offer may have arrived late on a busy machine
    for name in network.trainers:
        assert network.log(name).count("executor exited with status 0") >= 3


def small_job(network: LocalNetwork, settings: str = "", resources: str = "") -> Job:
    """Start a job with the small executor."""
    model = 'path = "../small-model"'
    return network.job(rounds=ROUNDS, kind="numpy", model=model, settings=settings, resources=resources)


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


def resume_without_workers(network: LocalNetwork, job: Job, grace: float) -> None:
    """Resume a job, whose scheduler was killed, when its workers have given up; check its rounds and terms."""
    wait_until(lambda: not network.executors(), 15 + grace, "executors of a scheduler that is gone")
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
    resume_without_workers(network, job, GRACE)


@pytest.mark.processes
def test_a_scheduler_that_is_killed_twice_in_a_row_goes_on_and_then_resumes(network: LocalNetwork) -> None:
    """First when it has just taken the job up, later in the round that was open when it was killed before."""
    job = small_job(network, f"orphan_grace = {LONG_GRACE}\n")
    job.wait_for_round(2)
    executors = {process.pid for process in network.commands()}
    kill(job)
    again = network.restart(job.name)
    again.wait_for(lambda: bool(again.records("resumed")), "the record that the job was taken up")
    kill(again)
    closed = len(job.records("round"))
    third = network.restart(job.name)
    third.wait_for_round(closed + 1)
    assert {process.pid for process in network.commands()} == executors
    kill(third)
    fourth = network.restart(job.name)
    await_record(fourth, lambda record: record["record"] == "contributed")
    kill(fourth)
    resume_without_workers(network, job, LONG_GRACE)
    adopted = [event.get("adopted") for event in job.events("resumed")]
    assert adopted == [len(network.trainers) + 1] * 3 + [None]


@pytest.mark.processes
def test_without_grace_a_killed_scheduler_costs_its_leases_and_executors(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY, settings="orphan_grace = 0\n")
    job.wait_for_round(1)
    assert len(network.commands()) == len(network.trainers)
    job.child.process.kill()
    assert job.wait(60) == -signal.SIGKILL
    wait_until(lambda: not network.executors(), 60, "executors of a scheduler that is gone")
    after = network.job(rounds=1)
    assert after.wait(90) == 0, after.log


@pytest.mark.processes
def test_an_interrupted_scheduler_releases_its_workers(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY)
    job.wait_for_round(1)
    job.child.process.send_signal(signal.SIGINT)
    assert job.wait(60) == 130
    assert "Traceback" not in job.log
    wait_until(lambda: not network.executors(), 60, "executors of a scheduler that left")


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


@pytest.mark.processes
def test_a_job_without_enough_workers_fails_after_its_timeout(network: LocalNetwork) -> None:
    job = small_job(network, resources="allocation_timeout = 6\n")
    job.wait_for_round(1)
    killed = time.time()
    network.kill("worker-1")
    assert job.wait(PROMPTLY) == 1
    paused = job.wait_for_event(PAUSED, after=killed)
    [failed] = job.events("failed")
    seconds = failed["time"] - paused["time"]
    print(f"failed {seconds:.1f} s after the pause")
    assert 5.0 <= seconds <= 12.0
    assert "1 of at least 2" in failed["error"]
    assert "Traceback" not in job.log


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
