"""Whole DiLoCo jobs on a simulated network: members come and go at every point of their work, and the job goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import mean
from typing import Any, ClassVar

import anyio
import pytest
from support.diloco_invariants import check_job, check_waits, durations
from support.diloco_network import LEASE, Network, Node
from support.diloco_processes import Process, Training
from support.diloco_scheduler import Scheduler
from support.diloco_simulation import BATCH, digest_of, job_table
from support.waiting import until

from hypha_net.testing import simulate
from hypha_proto.contributions import SampleRange
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import TrainConfig
from hypha_scheduler.strategies.base import StartTask, TaskEnded, TaskState
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN

PHASES = {"NaN": "stated"} | dict.fromkeys(("foreign ranges", "stale weights", "replayed"), "sending")
"""Phases of those faults that happen in one alone."""
SPARE = 3
"""Workers beyond those that the job wants, so that it always finds others."""


class Misfortunes:
    """Faults at random times and phases; after the last one the job is left alone."""

    KINDS: ClassVar[tuple[str, ...]] = (
        "executor exits",
        "executor out of memory",
        "executor killed by memory limit",
        "executor without room",
        "worker killed",
        "worker leaves",
        "worker drains",
        "executor stopped",
        "worker cut off",
        "NaN",
        "foreign ranges",
        "stale weights",
        "replayed",
        "server killed",
        "server fails",
        "server drains",
        "server cut off",
        "scheduler dies",
    )

    def __init__(self, seed: int, faults: int | None = None, mean: float = 8.0, kinds: tuple[str, ...] = KINDS) -> None:
        """Prepare faults.

        Args:
            seed: of what happens.
            faults: number of them; random if None.
            mean: mean number of seconds between two.
            kinds: those that may happen.
        """
        self.random = Random(f"misfortunes/{seed}")
        self.seed = seed
        self.left = self.random.randint(3, 12) if faults is None else faults
        self.mean, self.kinds = mean, kinds
        self.seen: Counter[str] = Counter()
        self._due: str | None = None
        """Fault that happens to the next process that reaches a phase."""

    def network(self, table: DilocoJobConfig) -> Network:
        """Return a network where these faults happen."""
        wanted = table.resources.num_workers
        return Network(
            self.seed,
            table,
            workers=wanted + SPARE,
            servers=3,
            slowness=(1.0, 0.7, 1.5),
            answer_loss=self.random.choice([0.0, 0.0, 0.01]),
            on_phase=self._on_phase,
            during=self._happen,
            downtime=self._downtime,
            loses_power=0.3,
        )

    def _downtime(self, random: Random) -> float:
        return random.uniform(0.5, 5.0) if random.random() < 0.7 else random.uniform(125.0, 150.0)

    async def _happen(self, network: Network) -> None:
        while self.left > 0:
            await anyio.sleep(self.random.expovariate(1.0 / self.mean))
            kind = self.random.choice(self.kinds)
            if kind == "scheduler dies":
                self._note(kind)
                network.dies_after = len(network.journal) + self.random.randint(1, 8)
            else:
                self._due = kind
                await until(lambda: self._due is None, 100_000, 0.5)
            self._keep_spares(network)

    def _note(self, kind: str) -> None:
        self.seen[kind] += 1
        self.left -= 1

    def _keep_spares(self, network: Network) -> None:
        """Add machines in place of those that were excluded or are gone."""
        for role, wanted in ((TRAIN, network.table.resources.num_workers + SPARE), (AGGREGATE, 3)):
            scheduler = network.scheduler
            excluded = set() if scheduler is None else self._excluded(scheduler)
            alive = [n for n in network.nodes.values() if n.role == role and n.is_alive and n.peer not in excluded]
            for _ in range(wanted - len(alive)):
                network.add_node(role)

    def _excluded(self, scheduler: Scheduler) -> set[object]:
        return {peer for request in scheduler.operator.role_requests() for peer in request.excluded}

    def _on_phase(self, phase: str, process: Process) -> None:
        kind = self._due
        if kind is None or self.random.random() < 0.7:
            return
        is_server = kind.startswith("server")
        if is_server == isinstance(process, Training) or phase != PHASES.get(kind, phase):
            return
        self._due = None
        self._note(kind)
        self._actions()[kind](process)

    def _actions(self) -> dict[str, Callable[[Process], None]]:
        return {
            "executor exits": lambda p: p.node.fail(self._failed(p, 1, "it exited")),
            "executor out of memory": lambda p: p.node.fail(self._failed(p, 75, "out of memory")),
            "executor killed by memory limit": lambda p: p.node.fail(
                self._failed(p, -9, "killed: it reached the memory limit of its lease")
            ),
            "executor without room": lambda p: p.node.fail(self._failed(p, 74, "no room on the disk")),
            "worker killed": lambda p: self._crash(p.node),
            "worker leaves": lambda p: p.node.leave(),
            "worker drains": lambda p: p.node.drain(),
            "executor stopped": self._stop,
            "worker cut off": lambda p: self._cut_off(p.node),
            "NaN": self._spoil,
            "foreign ranges": lambda p: self._lie(p, ranges=(SampleRange(90, 0, 0, BATCH),)),
            "stale weights": lambda p: self._lie(p, weights=digest_of("stale")),
            "replayed": lambda p: self._lie(p, round=1),
            "server killed": lambda p: self._crash(p.node),
            "server fails": lambda p: p.node.fail(self._failed(p, 1, "it exited")),
            "server drains": lambda p: p.node.drain(),
            "server cut off": lambda p: self._cut_off(p.node),
        }

    def _failed(self, process: Process, code: int, reason: str) -> TaskEnded:
        """Return an end with a last line of its own: the same error on two workers ends a job, whatever its numbers."""
        name = "".join(chr(ord("a") + int(digit)) for digit in str(process.network.number()))
        return TaskEnded(TaskState.FAILED, reason, code, (f"RuntimeError: {name}",))

    def _later(self, network: Network, longest: float, act: Callable[[], None]) -> None:
        seconds = self.random.uniform(0.1 * longest, longest)

        async def wait() -> None:
            await anyio.sleep(seconds)
            act()

        network.tasks.start_soon(wait)

    def _crash(self, node: Node) -> None:
        node.crash()
        self._later(node.network, 40.0, node.come_back)

    def _stop(self, process: Process) -> None:
        """Stop a process for less than `LONGEST_ROUND`: before its first batch nobody knows how long that takes."""
        process.stop()
        self._later(process.network, 40.0, process.resume)

    def _cut_off(self, node: Node) -> None:
        def heal() -> None:
            node.is_reachable = True

        node.is_reachable = False
        self._later(node.network, 30.0, heal)

    def _spoil(self, process: Process) -> None:
        """Let the last update that a worker has stated hold NaN."""
        assert isinstance(process, Training)
        if process.executor.latest is not None:
            process.network.nan.add(process.executor.latest)

    def _lie(self, process: Process, **false: object) -> None:
        """Let a worker state what is not so; nobody knows the weights before the first round."""
        assert isinstance(process, Training)
        if process.executor.round > 1:
            process.network.lies[process.peer] = false


ROUNDS = 8
SEEDS = [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(50)]
EXECUTOR_PHASES = ["preparing", "joining", "training", "sending", "stated", "pushed", "waiting", "merging"]
SERVER_PHASES = [
    "before the step",
    "in the step",
    "first half of the pushes",
    "second half of the pushes",
    "after the step",
]
LONGEST_ROUND = 45.0
"""Seconds: a lease that is lost, a worker that is left out, a restart, and training for those who have left."""
LONG_LIVED = {"preparing", "joining"}
"""Phases that a process is in only before its first round."""


def table(rounds: int = ROUNDS, **resources: Any) -> DilocoJobConfig:
    return job_table(
        rounds={"update_rounds": rounds, "avg_samples_between_updates": 64},
        resources={"num_workers": 4, "min_workers": 2, "allocation_timeout": 60.0} | resources,
    )


def run_job(network: Network) -> Network:
    """Run a job to its end, and check what must hold of every job."""
    simulate(network.run, seed=network.seed)
    check_job(network)
    return network


def finish(network: Network, rounds: int = ROUNDS) -> Network:
    """Run a job that must finish, without a round that takes longer than `LONGEST_ROUND`."""
    run_job(network)
    assert network.outcome == "finished"
    assert len(network.rounds) == rounds
    check_waits(network, LONGEST_ROUND)
    return network


def members(network: Network, number: int) -> set[str]:
    """Return the members of a recorded round."""
    return {member["peer"] for member in network.rounds[number - 1]["members"]}


class Once:
    """Observer that acts when a process first reaches a phase after some rounds."""

    def __init__(self, phase: str, act: Callable[[Process], None], after: int = 1) -> None:
        self._phase, self._act, self._after = phase, act, after
        self.met: list[Process] = []
        """The process, once it has acted."""
        self.at = 0.0
        """When it acted."""

    def __call__(self, reached: str, process: Process) -> None:
        is_early = self._phase not in LONG_LIVED and len(process.network.rounds) < self._after
        if not self.met and reached == self._phase and not is_early:
            self.met, self.at = [process], anyio.current_time()
            self._act(process)

    @property
    def peer(self) -> PeerId:
        [process] = self.met
        return process.peer


def failed(code: int | None = 1, reason: str = "it exited", *lines: str) -> TaskEnded:
    return TaskEnded(TaskState.FAILED, reason, code, lines or (f"RuntimeError: {reason}",))


# -------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("phase", EXECUTOR_PHASES)
def test_a_worker_that_is_killed_in_any_phase_is_replaced(phase: str) -> None:
    killed = Once(phase, lambda process: process.node.crash())
    network = finish(Network(table=table(), workers=5, on_phase=killed))

    about = [when for when, _, fields in network.events if fields.get("worker") == str(killed.peer)]
    lost = next(when for when in about if when > killed.at)
    assert lost - killed.at <= LEASE + 2.0
    assert (
        len({member["peer"] for record in network.rounds for member in record["members"]}) == 5 or phase in LONG_LIVED
    )
    assert len(members(network, ROUNDS)) == 4


@pytest.mark.parametrize("phase", EXECUTOR_PHASES)
def test_an_executor_that_dies_in_any_phase_is_started_again_on_its_lease(phase: str) -> None:
    died = Once(phase, lambda process: process.node.fail(failed()))
    network = finish(Network(table=table(), workers=4, on_phase=died))

    again = next(when for when, start in network.starts if when > died.at and start.task.lease.peer == died.peer)
    assert again - died.at <= 10.0
    assert str(died.peer) in members(network, ROUNDS)
    assert len(network.named("worker_restarted")) == 1


def test_an_executor_that_dies_the_third_time_is_replaced() -> None:
    victims: list[PeerId] = []

    def die_always(phase: str, process: Process) -> None:
        if phase == "training" and len(process.network.rounds) >= 1:
            if not victims:
                victims.append(process.peer)
            if process.peer == victims[0]:
                process.node.fail(failed(1, "it exited", f"ValueError: {process.network.number()}"))

    network = finish(Network(table=table(), workers=5, on_phase=die_always))

    attempts = [start for _, start in network.starts if start.task.lease.peer == victims[0]]
    assert len(attempts) == 3
    assert str(victims[0]) not in members(network, ROUNDS)
    assert len(members(network, ROUNDS)) == 4


def test_an_executor_that_memory_has_ended_computes_half_as_much_at_once() -> None:
    died = Once("training", lambda process: process.node.fail(failed(75, "out of memory", "MemoryError")))
    network = finish(Network(table=table(), workers=4, on_phase=died))

    sizes = [start.spec.training and start.spec.training.micro_batch for _, start in network.starts]
    assert [size for size in sizes if size] == [BATCH // 2]


def test_workers_of_different_memory_train_in_one_job() -> None:
    room: dict[PeerId, int] = {}
    ended: Counter[tuple[PeerId, int]] = Counter()

    def die_if_too_large(phase: str, process: Process) -> None:
        if phase != "training":
            return
        at_once = process.config.micro_batch or BATCH
        if at_once > room.setdefault(process.peer, max(1, BATCH >> len(room))):
            ended[process.peer, at_once] += 1
            process.node.fail(failed(75, "out of memory", "MemoryError"))

    network = finish(Network(table=table(), workers=4, on_phase=die_if_too_large))

    last = {start.task.lease.peer: train_config(start) for _, start in network.starts if start.task.lease.role == TRAIN}
    taken = {peer: config.micro_batch or BATCH for peer, config in last.items()}
    assert sorted(taken.values()) == sorted(room.values())
    assert len(set(taken.values())) >= 3
    assert set(ended.values()) == {1}, "memory ended a worker twice with the same number of samples at once"
    assert {config.batch_size for config in last.values()} == {BATCH}


def train_config(start: StartTask) -> TrainConfig:
    assert start.spec.training is not None
    return start.spec.training


def test_a_worker_whose_disk_is_full_is_replaced_and_others_go_on() -> None:
    end = failed(74, "no room on the disk: /disk/job", "OSError: No space left on device: '/work/job'")
    died = Once("training", lambda process: process.node.fail(end))
    network = finish(Network(table=table(), workers=5, on_phase=died))

    assert len([start for _, start in network.starts if start.task.lease.peer == died.peer]) == 1
    assert str(died.peer) not in members(network, ROUNDS)
    assert any("/disk/job" in str(fields) for _, _, fields in network.events)


def test_exit_code_two_ends_the_job_with_its_last_lines() -> None:
    end = failed(2, "it exited", "ValueError: the model does not fit the data")
    died = Once("training", lambda process: process.node.fail(end))
    network = run_job(Network(table=table(), workers=5, on_phase=died))

    assert "ValueError: the model does not fit the data" in str(network.outcome)


def test_a_stopped_executor_is_told_of_and_no_later_round_waits_for_it() -> None:
    stopped = Once("training", Process.stop, after=3)
    usual = mean(durations(finish(Network(table=table(), workers=3))))
    network = finish(Network(table=table(), workers=3, on_phase=stopped))

    peer = str(stopped.peer)
    told = next(when for when, name, about in network.events if name == "worker_suspected" and about["worker"] == peer)
    assert told - stopped.at <= 5.0 + 3 * 0.6
    number = next(number for number in range(1, ROUNDS + 1) if peer not in members(network, number))
    assert mean(durations(network)[number:]) <= usual * 3 / 2 / 0.95 + 0.5, "two do the work of three"


def test_a_stopped_executor_that_goes_on_begins_anew_with_the_weights() -> None:
    stopped = Once("training", Process.stop)

    async def resume(network: Network) -> None:
        await until(lambda: stopped.met, 1000, 0.5)
        number = len(network.rounds)
        await until(lambda: len(network.rounds) >= number + 2, 1000, 0.1)
        stopped.met[0].resume()

    network = finish(Network(table=table(12), workers=4, on_phase=stopped, during=resume), 12)

    assert network.seen["rejoined"] >= 1
    assert network.seen["refused"] == 0
    assert str(stopped.peer) in members(network, 12)


def test_a_worker_that_stays_silent_for_three_rounds_is_replaced() -> None:
    network = finish(Network(table=table(12), workers=5, on_phase=Once("training", Process.stop)), 12)

    assert len(members(network, 12)) == 4
    assert network.named("worker_replaced")


def test_a_job_starts_with_the_minimum_and_grows() -> None:
    async def arrive(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 2, 1000, 0.5)
        for _ in range(3):
            network.add_node(TRAIN)

    network = finish(Network(table=table(num_workers=4, max_workers=5), workers=2, during=arrive))

    assert len(members(network, 1)) == 2
    assert len(members(network, ROUNDS)) == 5


def test_a_joiner_that_prepares_for_long_holds_no_round_up() -> None:
    async def arrive(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 2, 1000, 0.1)
        network.add_node(TRAIN).start_factor = 30.0

    usual = durations(finish(Network(table=table(24), workers=3), 24))
    network = finish(Network(table=table(24), workers=3, during=arrive), 24)

    assert mean(durations(network)) <= 1.05 * mean(usual)
    assert len(members(network, 24)) == 4


def test_a_worker_that_drains_hands_its_round_in_and_is_replaced() -> None:
    drained: list[tuple[int, PeerId]] = []

    def drain(process: Process) -> None:
        drained.append((process.executor.round, process.peer))  # type: ignore[attr-defined]
        process.node.drain()

    network = finish(Network(table=table(12), workers=5, on_phase=Once("training", drain)), 12)

    [(number, peer)] = drained
    assert str(peer) in members(network, number)
    assert str(peer) not in members(network, 12)
    assert len(members(network, 12)) == 4


def test_a_job_pauses_below_its_minimum_and_goes_on() -> None:
    async def come_and_go(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 3, 1000, 0.1)
        nodes = [process.node for process in network.processes(TRAIN)]
        for node in nodes[:3]:
            node.crash()
        await anyio.sleep(40.0)
        assert network.named("paused")
        for node in nodes[:3]:
            node.come_back()

    network = finish(Network(table=table(), workers=4, during=come_and_go))

    assert network.named("continued")
    assert len(members(network, ROUNDS)) >= 2


def test_a_job_whose_workers_do_not_return_fails_after_the_allocation_timeout() -> None:
    async def go(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 3, 1000, 0.1)
        for process in network.processes(TRAIN)[:3]:
            process.node.crash()

    network = run_job(Network(table=table(), workers=4, during=go))

    assert "too few workers" in str(network.outcome)


# ----------------------------------------------------------------------------------------------------- parameter server


@pytest.mark.parametrize("phase", SERVER_PHASES)
def test_a_parameter_server_that_is_killed_in_any_phase_is_replaced(phase: str) -> None:
    killed = Once(phase, lambda process: process.node.crash(), after=2)
    network = finish(Network(table=table(), servers=2, on_phase=killed))

    started = [when for when, start in network.starts if start.task.lease.role == AGGREGATE and when > killed.at]
    assert started[0] - killed.at <= 30.0
    assert [record["term"] for record in network.rounds] == sorted(record["term"] for record in network.rounds)
    assert network.rounds[-1]["term"] == 2


def test_a_parameter_server_is_lost_at_any_message_of_a_round() -> None:
    """Each time that something reaches a phase in the third round, once in a job of its own."""
    first = finish(Network(table=table(4), servers=2), 4)
    begin, end = (sum(1 for _ in first.phases.elements()) * part // 4 for part in (2, 3))

    for moment in range(begin, end, 3):
        count = 0

        def kill(phase: str, process: Process, moment: int = moment) -> None:
            nonlocal count
            count += 1
            if count == moment:
                for server in process.network.processes(AGGREGATE):
                    server.node.crash()

        network = finish(Network(seed=moment, table=table(4), servers=2, on_phase=kill), 4)
        assert network.rounds[-1]["term"] == 2


def test_a_parameter_server_that_fails_by_itself_is_replaced_by_another() -> None:
    end = failed(1, "OSError: [Errno 28] No space left on device: '/srv/outer'")
    failing = Once("before the step", lambda process: process.node.fail(end))
    network = finish(Network(table=table(), servers=2, on_phase=failing))

    servers = [start.task.lease.peer for _, start in network.starts if start.task.lease.role == AGGREGATE]
    assert servers[0] == failing.peer != servers[1]


@pytest.mark.parametrize(("phase", "rounds"), [("in the step", 1), ("server starts", 0)])
def test_a_parameter_server_that_drains_is_replaced_without_a_lost_round(phase: str, rounds: int) -> None:
    """Also after the first round, whose outer momentum the next server needs."""
    drains = Once(phase, lambda process: process.node.drain(), rounds)
    network = finish(Network(table=table(12), servers=2, on_phase=drains), 12)

    assert network.rounds[-1]["term"] == 2


def test_a_parameter_server_that_was_replaced_is_not_heard_any_more() -> None:
    """It is cut off from the scheduler only: the outer update of its term arrives at workers, and counts nowhere."""

    async def cut_off(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 2, 1000, 0.1)
        [server] = network.processes(AGGREGATE)
        server.node.hears_scheduler = False
        await until(lambda: network.rounds[-1]["term"] >= 2, 1000, 0.5)
        server.node.hears_scheduler = True

    network = finish(Network(table=table(), servers=2, during=cut_off))

    assert network.rounds[-1]["term"] == 2


# ------------------------------------------------------------------------------------------------------------ scheduler


@pytest.mark.parametrize("adopts", [True, False], ids=["taken up", "resumed"])
def test_a_scheduler_that_dies_after_any_record_goes_on(adopts: bool) -> None:
    records = len(finish(Network(table=table(2)), 2).journal)

    for number in range(1, records):
        network = Network(seed=number, table=table(2), downtime=lambda _: 2.0 if adopts else 140.0)
        network.dies_after = number
        finish(network, 2)
        assert network.died == 1


def test_a_scheduler_that_dies_while_a_parameter_server_is_replaced_goes_on() -> None:
    for number in range(1, 12):

        def kill(process: Process, number: int = number) -> None:
            process.node.crash()
            process.network.dies_after = len(process.network.journal) + number

        killed = Once("before the step", kill)
        finish(Network(seed=number, table=table(5), servers=2, on_phase=killed), 5)
        assert killed.met


def test_a_scheduler_that_is_started_again_does_not_wait_for_a_worker_that_is_away() -> None:
    stopped = Once("training", Process.stop)

    async def kill_scheduler(network: Network) -> None:
        await until(lambda: network.named("worker_late"), 1000, 0.1)
        number = len(network.rounds)
        await until(lambda: len(network.rounds) >= number + 2, 1000, 0.1)
        await anyio.sleep(1.0)
        network.kill_scheduler()
        await anyio.sleep(10.0)
        stopped.met[0].resume()

    network = finish(Network(table=table(12), workers=4, on_phase=stopped, during=kill_scheduler), 12)

    assert max(durations(network)) < 30.0
    assert network.seen["refused"] == 0


def test_a_scheduler_that_has_lost_assignments_with_its_power_goes_on() -> None:
    async def kill_scheduler(network: Network) -> None:
        await until(lambda: len(network.rounds) >= 2, 1000, 0.1)
        await anyio.sleep(1.5)
        network.kill_scheduler()

    network = finish(Network(table=table(), workers=4, during=kill_scheduler, loses_power=1.0))

    assert network.seen["power lost"] == 1
    assert network.seen["rejoined"] >= 1
    assert network.seen["refused"] == 0


def test_a_round_goes_on_when_a_draining_worker_leaves_for_which_it_waits() -> None:
    """The worker stands still between its update of one round and the next, for as long as the round takes."""

    async def stand_still(network: Network) -> None:
        await until(lambda: network.phases["pushed"], 1000)
        process = network.processes(TRAIN)[0]
        process.node.drain()
        process.stop()
        await anyio.sleep(20.0)
        process.resume()

    network = finish(Network(table=table(), workers=5, during=stand_still))

    assert max(durations(network)) < 40.0


# --------------------------------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_there_is_one_model_and_each_sample_counts_once(seed: int) -> None:
    finish(Misfortunes(seed).network(table()))


@pytest.mark.nightly
def test_the_seeds_meet_every_misfortune() -> None:
    seen: Counter[str] = Counter()
    wanted = {*Misfortunes.KINDS, "taken up", "resumed", "power lost", "rejoined", "answer lost", "refused", "missing"}
    for seed in range(50):  # a scheduler that stays away for long comes once in about ten jobs
        misfortunes = Misfortunes(seed)
        network = misfortunes.network(table())
        simulate(network.run, seed=seed)
        seen += misfortunes.seen + network.seen
        if wanted <= set(seen):
            break

    assert wanted <= set(seen), seen
