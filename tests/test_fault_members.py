"""Members of a training job that come and go, on real processes: no process whose end ends the job.

Four workers with a numpy executor, of which a job has three, two parameter servers, and two data nodes. After each
fault `audit` and `replay` prove that nothing was lost. The times are printed at the end; the page ``docs/faults.md``
has them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import pytest
from support.fault_table import FaultRow
from support.local_network import Job, LocalNetwork, local_network
from support.member_faults import (
    CONTINUED,
    JOINED,
    LEFT,
    LOST,
    PAUSED,
    REPLACED,
    RESTARTED,
    SUSPECTED,
    Record,
    await_record,
    first_round_with,
    name_of,
    rounds_done_again,
    servers_of,
    wait_until_complete,
)
from support.numpy_executor import KILL, MEMORY, Failure, executor_toml, write_model
from support.proof import check_whole_epochs, prove
from support.small_disk import full_disk, small_disk
from support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(240)]

NODES = 4
WORKERS = 3
"""Workers of a job; the fourth replaces one that is lost."""
FEATURES = 64
LARGE = 500_000
"""Parameters of the large model that training does not change: sending its update of 2 MB takes a moment."""
DELAY = 0.05
"""Seconds that each batch takes longer; a worker has about 25 of them in a round."""
BATCH = 16
DRAIN_TIMEOUT = 60
"""Seconds for which a worker that gets SIGTERM waits for its job."""
LOST_WITHIN = 12.0
"""Seconds from the end of a worker until it counts as lost."""
TRAINS_AGAIN = 10.0 + 3.0
"""Seconds from the end of an executor until its successor trains: 10, and the time that this one takes to start."""
TOLD_WITHIN = 10.0
"""Seconds from the stop of an executor until it is suspected: 2, and three of its batches, on an idle machine."""
SPEED = 0.5
"""Speed of the others while an executor stands still, in a few rounds; 1.0 on an idle machine."""
SERVER_WITHIN = 30.0
"""Seconds from the end of a parameter server until a round is recorded with the next one."""
PROVIDER_WITHIN = 5.0
"""Seconds that a round takes longer at most when a data node is killed."""
DISK = 24 << 20
"""Bytes of a small disk."""
FAILING = (Failure(2, MEMORY, batch=5, above=BATCH // 2), Failure(5, KILL, batch=5))
"""One executor runs out of memory with whole batches, later one is ended as the kernel does it."""


def executors(root: Path) -> str:
    """Return TOML of the executors of each worker."""
    counts = root.parent / "counts"
    counts.mkdir(exist_ok=True)
    return executor_toml("numpy", DELAY) + executor_toml("failing", DELAY, failures=FAILING, counts=counts / "failing")


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    twins = {"data-2": "data", "parameter-server-2": "parameter-server"}
    extensions = {f"worker_{number}": executors(root) for number in range(1, NODES + 1)}
    with local_network(root, NODES, twins, drain_timeout=DRAIN_TIMEOUT, **extensions) as running:
        write_model(root / "small-model", FEATURES)
        write_model(root / "large-model", FEATURES, unused=LARGE)
        yield running


@pytest.fixture(autouse=True)
def _every_node_runs(network: LocalNetwork) -> Iterator[None]:
    yield
    network.stop_jobs()
    network.revive()
    network.check_quiet()


def start(
    network: LocalNetwork, rounds: int, kind: str = "numpy", model: str = "small-model", resources: str = ""
) -> Job:
    """Start a job for three workers that goes on with two."""
    return network.job(
        rounds=rounds,
        kind=kind,
        model=f'path = "../{model}"',
        workers=WORKERS,
        min_workers=WORKERS - 1,
        resources=resources,
    )


def at_a_contribution(job: Job) -> tuple[str, int]:
    """Wait until a worker has stated its update; return its peer id and the round."""
    stated = await_record(job, lambda record: record["record"] == "contributed")
    return stated["worker"], stated["round"]


def at_a_step(job: Job) -> tuple[str, int]:
    """Wait until the parameter server is told to take a step; return a member and the round."""
    announced = await_record(job, lambda record: record["record"] == "announced")
    return announced["members"][0][0], announced["round"]


def in_training(job: Job) -> tuple[str, int]:
    """Wait until workers train; return one of them and the round."""
    closed = await_record(job, lambda record: record["record"] == "round")
    time.sleep(5 * DELAY)  # within the next round, which has 25 batches
    return closed["members"][0]["peer"], closed["round"] + 1


PHASES = {
    "while it trains": in_training,
    "when it has stated its update": at_a_contribution,
    "while it waits for the outer update": at_a_step,
}
"""Moments at which a worker is killed."""


def test_a_killed_worker_is_lost_and_replaced(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 28
    job = start(network, rounds, model="large-model")
    job.wait_for_round(1)
    for phase, moment in PHASES.items():
        wait_until_complete(job, WORKERS)
        peer, number = moment(job)
        victim = name_of(network, peer)
        killed = time.time()
        network.kill(victim)
        lost = job.wait_for_event(LOST, after=killed, worker=peer)
        joined = job.wait_for_event(JOINED, after=killed)
        missed = len(job.events("round"))
        assert lost["time"] - killed <= LOST_WITHIN
        job.wait_for(lambda: first_round_with(job, joined["worker"], number) is not None, "a round of the new worker")  # noqa: B023
        first = first_round_with(job, joined["worker"], number)
        assert first is not None
        assert first <= missed + 2, "it did not train in the round after it had joined"
        network.start(victim)
        network.wait_healthy(victim)
        took, joins = lost["time"] - killed, joined["time"] - killed
        fault_row(
            f"`kill -9` of a worker {phase}",
            f"lost after {took:.1f} s, another one joined after {joins:.1f} s, its updates count from round {first} "
            f"(killed in round {number})",
        )
    prove(network, job, rounds)
    check_whole_epochs(job, rounds * 2 // 3)


def test_executors_that_die_are_started_again(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 20
    job = start(network, rounds, kind="failing")
    faults = ("an executor raises MemoryError", "an executor is ended by SIGKILL, as when memory is exhausted")
    for number, fault in enumerate(faults):
        job.wait_for(lambda: len(job.events(RESTARTED)) > number, f"a restart after {fault}")  # noqa: B023
        restarted = job.events(RESTARTED)[number]
        joined = job.wait_for_event(JOINED, after=restarted["time"], worker=restarted["worker"])
        # the second failure may hit the same worker, which halves its micro-batch again
        restarts = sum(event["worker"] == restarted["worker"] for event in job.events(RESTARTED)[: number + 1])
        assert restarted["micro_batch"] == BATCH // 2**restarts
        assert joined["time"] - restarted["time"] <= TRAINS_AGAIN
        job.wait_for(
            lambda: reports_micro_batch(job, restarted["worker"], restarted["micro_batch"]),  # noqa: B023
            f"a round with a micro-batch of {restarted['micro_batch']}",
        )
        fault_row(
            fault,
            f"trains again {joined['time'] - restarted['time']:.1f} s after its restart, "
            f"with a micro-batch of {restarted['micro_batch']} instead of {2 * restarted['micro_batch']}",
        )
    assert job.events(LOST) == job.events(REPLACED) == []
    kill_three_times(network, job, fault_row)
    prove(network, job, rounds)
    check_whole_epochs(job, rounds * 2 // 3)


def reports_micro_batch(job: Job, worker: str, size: int) -> bool:
    """Return whether the executor of a worker has reported a micro-batch of this size."""
    found = (event for event in job.events("metric") if event["name"] == "micro_batch")
    return any((event["worker"], event["value"]) == (worker, size) for event in found)


def kill_three_times(network: LocalNetwork, job: Job, fault_row: FaultRow) -> None:
    """Kill the executor of a worker of which none has died until its worker is replaced."""
    wait_until_complete(job, WORKERS)
    already = {event["worker"] for event in job.events(RESTARTED)}
    members = {member["peer"] for member in job.records("round")[-1]["members"]}
    peer = sorted(members - already)[0]
    victim, seconds = name_of(network, peer), []
    for _ in range(2):
        killed = time.time()
        network.commands(victim)[0].send_signal(signal.SIGKILL)
        joined = job.wait_for_event(JOINED, after=killed, worker=peer)
        seconds.append(joined["time"] - killed)
        assert seconds[-1] <= TRAINS_AGAIN
    killed = time.time()
    network.commands(victim)[0].send_signal(signal.SIGKILL)
    replaced = job.wait_for_event(REPLACED, after=killed, worker=peer)
    [spare] = {network.peer_id(name) for name in network.trainers} - members
    joined = job.wait_for_event(JOINED, after=killed, worker=spare)
    assert "3 times" in replaced["reason"]
    fault_row("an executor is killed, twice", f"trains again after {seconds[0]:.1f} and {seconds[1]:.1f} s")
    fault_row("it is killed a third time", f"another worker has joined after {joined['time'] - killed:.1f} s")


def test_a_stopped_executor_slows_nobody(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 16
    job = start(network, rounds)
    job.wait_for_round(5)
    peer = sorted(job.events("round")[-1]["counts"])[0]
    executor = network.commands(name_of(network, peer))[0]
    stopped, before = time.time(), len(job.events("round"))
    executor.suspend()
    try:
        suspected = job.wait_for_event(SUSPECTED, after=stopped, worker=peer)
        replaced = job.wait_for_event(REPLACED, after=stopped, worker=peer)
        joined = job.wait_for_event(JOINED, after=stopped)
        wait_until_complete(job, WORKERS)
    finally:
        if executor.is_running():
            executor.resume()
    assert suspected["time"] - stopped <= TOLD_WITHIN
    ratio = speed_beside(job, peer, before, joined["time"])
    assert ratio >= SPEED
    fault_row(
        "one executor of three is stopped",
        f"told after {suspected['time'] - stopped:.1f} s; the others train at {ratio:.2f} of their speed from the "
        f"second round on; replaced after {replaced['time'] - stopped:.1f} s",
    )
    prove(network, job, rounds)


def speed_beside(job: Job, peer: str, before: int, until: float) -> float:
    """Return the speed of each other worker in rounds without a peer, as a part of its speed before.

    The first round without it is the one in which it was waited for.
    """
    events = job.events("round")
    with_it = [event for event in events if 1 < event["round"] <= before]
    without = [event for event in events if event["round"] > before + 1 and event["time"] < until]
    assert without, "no round was closed without the stopped executor"

    def rate(rounds: list[Record]) -> float:
        batches = sum(count for event in rounds for name, count in event["counts"].items() if name != peer)
        return batches / sum(event["seconds"] for event in rounds)

    return rate(without) / rate(with_it)


def await_step(network: LocalNetwork, job: Job, server: str) -> None:
    """Wait until the parameter server has taken a step, whose result it then pushes."""
    path = network.processes.child(server).log
    taken = path.read_bytes().count(b"outer step over")
    deadline = time.monotonic() + 60
    while path.read_bytes().count(b"outer step over") == taken:
        assert time.monotonic() < deadline, job.log
        time.sleep(0.001)


@contextmanager
def half_of_the_pushes(network: LocalNetwork, job: Job, server: str) -> Iterator[None]:
    """Stop a worker before it has the outer update of a round, which is recorded meanwhile."""
    last = job.records("round")[-1]
    before, peer = last["round"], last["members"][0]["peer"]
    worker = psutil.Process(network.processes.child(name_of(network, peer)).process.pid)
    await_step(network, job, server)
    worker.suspend()
    try:
        job.wait_for(lambda: job.records("round")[-1]["round"] > before, "the record of the round")
        yield
    finally:
        worker.resume()


MOMENTS = ("before the step", "in the step", "after the step", "with half of its pushes done")


def test_a_killed_parameter_server_is_replaced(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 18
    job = start(network, rounds, model="large-model")
    job.wait_for_round(1)
    for moment in MOMENTS:
        wait_until_complete(job, WORKERS)
        again, term = rounds_done_again(job), len(servers_of(job))
        number, killed = kill_server(network, job, moment)
        served = await_record(job, lambda record: record["record"] == "round" and record["term"] > term)  # noqa: B023
        took = time.time() - killed
        assert took <= SERVER_WITHIN
        repeated = rounds_done_again(job) - again
        assert len(repeated) <= 1
        network.revive()
        fault_row(
            f"parameter server killed {moment}",
            f"round {served['round']} recorded with another one after {took:.1f} s (killed in round {number}), "
            f"{len(repeated)} done again",
        )
    assert job.events(LOST) == []
    prove(network, job, rounds)
    check_whole_epochs(job, rounds * 2 // 3)
    assert len(set(servers_of(job))) == 2


def kill_server(network: LocalNetwork, job: Job, moment: str) -> tuple[int, float]:
    """Kill the parameter server at a moment of a round; return the round and when."""
    server = name_of(network, servers_of(job)[-1])
    opened = job.records("round")[-1]["round"] + 1
    if moment == "with half of its pushes done":
        with half_of_the_pushes(network, job, server):
            network.kill(server)
            return opened, time.time()
    if moment == "after the step":
        await_step(network, job, server)
    else:
        (in_training if moment == "before the step" else at_a_step)(job)
    network.kill(server)
    return opened, time.time()


def test_a_worker_that_joins_restarts_and_leaves(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 26
    for name in ("worker-3", "worker-4"):
        network.kill(name)
    began = time.time()
    job = start(network, rounds)
    job.wait_for_round(1)
    placed = job.wait_for_event("placement")
    assert 2.0 <= placed["seconds"] <= 20.0
    fault_row("two workers of three are there", f"the job has its leases after {placed['time'] - began:.1f} s")
    join(network, job, "worker-3", fault_row, "a worker joins")
    network.kill("worker-3")
    job.wait_for_event(LOST, worker=network.peer_id("worker-3"))
    join(network, job, "worker-3", fault_row, "a worker is killed and started again")
    leave(network, job, "worker-1", fault_row)
    join(network, job, "worker-4", fault_row, "a worker joins in place of one that has left")
    prove(network, job, rounds)
    check_whole_epochs(job, rounds // 2)


def join(network: LocalNetwork, job: Job, name: str, fault_row: FaultRow, fault: str) -> None:
    """Start a worker; check that its updates count from the round after it was ready."""
    began = time.time()
    network.start(name)
    network.wait_healthy(name)
    healthy, peer = time.time(), network.peer_id(name)
    joined = job.wait_for_event(JOINED, after=began, worker=peer)
    opened = joined["round"]
    job.wait_for(lambda: first_round_with(job, peer, opened - 1) is not None, f"a round of {name}")
    assert first_round_with(job, peer, opened - 1) == opened
    job.wait_for_round(opened)
    closed = {event["round"]: event for event in job.events("round")}
    fault_row(
        fault,
        f"takes part from round {opened}, {joined['time'] - healthy:.1f} s after it was healthy; the round took "
        f"{closed[opened]['seconds']:.2f} s, the one before {closed[opened - 1]['seconds']:.2f} s",
    )


def leave(network: LocalNetwork, job: Job, name: str, fault_row: FaultRow) -> None:
    """End a worker with SIGTERM; check that its round counts."""
    wait_until_complete(job, WORKERS)
    process = network.processes.child(name).process
    began = time.time()
    process.send_signal(signal.SIGTERM)
    left = job.wait_for_event(LEFT, after=began, worker=network.peer_id(name))
    assert process.wait(60) == 0
    job.wait_for_round(left["round"])
    [record] = [record for record in job.records("round") if record["round"] == left["round"]]
    assert network.peer_id(name) in {member["peer"] for member in record["members"]}
    fault_row("SIGTERM to a worker", f"leaves after {left['time'] - began:.1f} s, its update of the round counts")


def slices_served(network: LocalNetwork, name: str) -> int:
    """Return the number of slices that a data node has served."""
    return network.log(name).count("INFO hypha_data.slice_resolver: slice ")


def test_data_nodes_are_killed(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 14
    job = start(network, rounds)
    job.wait_for_round(3)
    usual = median(event["seconds"] for event in job.events("round")[1:])
    network.kill("data")
    served, closed = slices_served(network, "data-2"), len(job.events("round"))
    job.wait_for_round(closed + 3)
    longer = max(event["seconds"] for event in job.events("round")[closed:]) - usual
    assert longer <= PROVIDER_WITHIN
    assert slices_served(network, "data-2") > served
    killed = time.time()
    network.kill("data-2")
    paused = job.wait_for_event(PAUSED, after=killed, timeout=90)
    assert "data" in paused["reason"]
    network.revive()
    back = time.time()
    job.wait_for_event(CONTINUED, after=paused["time"])
    job.wait_for_round(len(job.events("round")) + 1)
    again = time.time()
    fault_row("data node killed", f"slices come from another one; a round takes {max(0.0, longer):.1f} s longer")
    fault_row(
        "no data node is left",
        f"pause told after {paused['time'] - killed:.1f} s; a round is closed {again - back:.1f} s after one is back",
    )
    assert job.events(LOST) == []
    prove(network, job, rounds)


def test_the_disks_of_a_worker_and_of_the_parameter_server_are_full(network: LocalNetwork, fault_row: FaultRow) -> None:
    rounds = 20
    nodes = ("worker-1", "parameter-server")
    for name in ("worker-4", "parameter-server-2", *nodes):
        network.kill(name)
    disks = [network.folders.work / name for name in nodes]
    with small_disk(disks[0], DISK, "750"), small_disk(disks[1], DISK, "750"):
        for name in nodes:
            network.start(name)
        network.wait_healthy(*nodes)
        job = start(network, rounds)
        job.wait_for_round(2)
        network.revive()
        fill_worker(network, job, disks[0], fault_row)
        fill_server(network, job, disks[1], fault_row)
        prove(network, job, rounds)
        for name in nodes:
            network.kill(name)


def fill_worker(network: LocalNetwork, job: Job, folder: Path, fault_row: FaultRow) -> None:
    """Fill the disk of a worker until it is replaced."""
    peer, began = network.peer_id("worker-1"), time.time()
    with full_disk(folder):
        replaced = job.wait_for_event(REPLACED, after=began, worker=peer)
        wait_until(lambda: not network.executors("worker-1"), 60, "the end of the executor without a disk")
        joined = job.wait_for_event(JOINED, after=began, worker=network.peer_id("worker-4"))
    assert f"work/{folder.name}/" in replaced["reason"]
    assert [event for event in job.events(REPLACED) if event["worker"] == peer] == [replaced]
    fault_row(
        "the disk of a worker is full",
        f"replaced after {replaced['time'] - began:.1f} s with the path as the reason, another one has joined after "
        f"{joined['time'] - began:.1f} s",
    )


def fill_server(network: LocalNetwork, job: Job, folder: Path, fault_row: FaultRow) -> None:
    """Fill the disk of the parameter server until another one serves the job."""
    began, term = time.time(), len(servers_of(job))
    with full_disk(folder):
        await_record(job, lambda record: record["record"] == "round" and record["term"] > term)
    took = time.time() - began
    assert took <= SERVER_WITHIN
    assert f"work/{folder.name}/" in job.log
    fault_row("the disk of the parameter server is full", f"a round recorded with another one after {took:.1f} s")
