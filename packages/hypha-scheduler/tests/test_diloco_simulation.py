"""Whole DiLoCo jobs under random faults: whatever happens, the records say what was averaged, each sample once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from support.diloco_simulation import BATCH, PEERS, SERVER, Executor, Job, SchedulerDied, digest_of, job_table

from hypha_proto.contributions import SampleRange, StateContribution
from hypha_proto.ids import PeerId
from hypha_proto.progress import Done
from hypha_scheduler.audit.diloco import DilocoFindings, audit_records
from hypha_scheduler.strategies.base import TaskState

pytestmark = pytest.mark.virtual_clock

WORKERS = PEERS[:4]
ROUNDS = 6
STEPS = 6000
SEEDS = [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(50)]

Span = tuple[int, int, int, int]
Position = tuple[int, int, int]


@dataclass
class Fate:
    """What happens to the update of a worker in a round."""

    statement: StateContribution
    accepted: bool | None = None
    arrives: bool = True
    is_nan: bool = False


@dataclass
class Chaos:
    """A seeded generator of events and faults, and the truth about what was done."""

    seed: int
    job: Job = field(init=False)
    truth: dict[str, list[Span]] = field(default_factory=dict)
    """Ranges that each update was computed from, by its digest."""
    fates: dict[PeerId, Fate] = field(default_factory=dict)
    died: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Faults by their names."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.job = Job(
            table=job_table(
                rounds={
                    "update_rounds": ROUNDS,
                    "avg_samples_between_updates": 64,
                    "timeout": 120.0,
                    "step_timeout": 600.0,
                    "merge_timeout": 600.0,
                },
                resources={"num_workers": 4, "min_workers": 1},
            )
        )

    async def run(self) -> None:
        self.job.open()
        self.start()
        for _ in range(STEPS):
            if self.job.outcome is not None:
                return
            if self.job.dies_after is None and self.random.random() < 0.01:
                self.job.dies_after = len(self.job.journal) + self.random.randint(1, 6)
            try:
                await self.act()
            except SchedulerDied:
                self.restart()
        raise AssertionError(f"the job does not end: {self.seen}, {len(self.job.rounds)} rounds")

    def start(self) -> None:
        """Find workers until the scheduler lives long enough to start them."""
        self.fates.clear()
        while True:
            try:
                self.job.lease(WORKERS)
            except SchedulerDied:
                self.seen["died at the start"] += 1
                self.job.open()
            else:
                return

    def restart(self) -> None:
        """Start the scheduler again: within the grace, or after it."""
        job = self.job
        self.died += 1
        if self.random.random() < 0.3:  # power was lost, too: assignments that no later record has synced are gone
            while job.journal and job.journal[-1]["record"] == "assigned":
                job.journal.pop()
        while True:
            try:
                job.open()
                if job.outcome is not None:
                    return
                if self.random.random() < 0.7 and SERVER in job.leases:
                    self.seen["taken up"] += 1
                    job.adopt()
                else:
                    job.leases.clear()
                if SERVER not in job.leases:
                    self.seen["resumed"] += 1
                    self.start()
            except SchedulerDied:
                continue
            return

    async def act(self) -> None:
        job = self.job
        job.now += self.random.uniform(0.1, 3.0)
        due = job.operator.next_deadline()
        if due is not None and due <= job.now:
            job.apply(job.operator.on_deadline(job.now))
        job.holds_messages = self.random.random() < 0.3
        await job.run_background()
        if job.unanswered and self.random.random() < 0.5:
            job.answer_message()
        elif self.random.random() < 0.2:
            await self.serve()
        elif job.executors:
            self.work(job.executors[self.random.choice(sorted(job.executors))])
        else:
            await self.serve()
            self.give_up_without_workers()

    def give_up_without_workers(self) -> None:
        """Let the search for workers time out: nobody comes in this network."""
        if self.job.outcome is None and not self.job.executors and self.job.operator._running is not None:
            self.seen["nobody left"] += 1
            self.job.apply(self.job.operator.on_allocation_timeout("train", "0 workers remain", self.job.now))

    # ------------------------------------------------------------------------------------------------ parameter server

    async def serve(self) -> None:
        """Let the parameter server do what is its turn."""
        job, server = self.job, self.job.server
        if job.outcome is not None or SERVER not in job.leases:
            return
        if server.stepped is not None:
            if job.unanswered:  # the push waits for the response
                job.holds_messages = False
                job.answer_message()
            refusal = await job.push(server.stepped)
            assert refusal is None, refusal
            return
        if server.members is None or job.unanswered:
            return
        missing = server.missing
        if missing and self.random.random() < 0.9:
            return
        for peer in missing:
            self.seen["missing"] += 1
            if SERVER in job.leases and job.outcome is None:
                job.refuse(peer, "it did not arrive in time", missing=True)
        members = () if server.members is None else server.members.members
        if any(server.updates.get((server.round, m.peer)) == m.update for m in members):
            server.step()

    # ---------------------------------------------------------------------------------------------------------- workers

    def work(self, executor: Executor) -> None:
        job, peer = self.job, executor.peer
        if self.random.random() < 0.003 and len(job.executors) > 1:
            self.seen["lost"] += 1
            self.fates.pop(peer, None)
            job.lose(peer)
        elif executor.is_waiting:
            self.wait(executor)
        elif executor.left is not None and executor.left <= 0:
            self.send(executor)
        elif isinstance(job.train_batch(peer), Done):
            job.end_task(peer)

    def wait(self, executor: Executor) -> None:
        """Merge the outer update if it is committed; before, let the own update arrive."""
        job, peer = self.job, executor.peer
        fate = self.fates.get(peer)
        if fate is not None and fate.accepted and executor.round == job.server.round:
            if fate.is_nan:
                fate.is_nan = fate.arrives = False
                self.seen["NaN"] += 1
                job.refuse(peer)
            elif fate.arrives:
                job.server.updates[executor.round, peer] = fate.statement.update
        if peer in job.executors and executor.round in job.commits:
            self.fates.pop(peer, None)
            if isinstance(job.merge(peer), Done):
                job.end_task(peer)

    def send(self, executor: Executor) -> None:
        job, peer = self.job, executor.peer
        fate = self.fates.get(peer)
        if fate is None:
            fate = self.fates[peer] = self.choose(executor)
        fate.accepted, _why = job.state(peer, fate.statement)
        if self.random.random() < 0.1 and peer in job.executors:
            self.seen["repeated"] += 1
            assert job.state(peer, fate.statement)[0] == fate.accepted
        if not fate.accepted and self.random.random() < 0.3 and peer in job.executors:
            self.seen["executor ended"] += 1
            job.end_task(peer, TaskState.FAILED, "its update was refused")

    def choose(self, executor: Executor) -> Fate:
        """Return an update, most often a correct one."""
        task = self.job.leases[executor.peer]
        kind = self.random.choices(
            ["right", "NaN", "vanishes", "foreign ranges", "stale weights", "false digest", "replayed"],
            [80, 4, 4, 3, 3, 3, 3],
        )[0]
        changes: dict[str, object] = {}
        if kind == "foreign ranges":
            changes["ranges"] = (SampleRange(0, self.random.randrange(5), 0, BATCH), SampleRange(90, 0, 0, BATCH))
        elif kind == "stale weights":
            changes["weights"] = digest_of("stale")
        elif kind == "replayed":
            changes["round"] = max(1, executor.round - 1)
        statement = executor.statement(task, **changes)
        if kind == "stale weights" and executor.round == 1:
            kind = "right"  # nobody knows the digest before the first round
        if kind == "false digest":
            assert statement.contribution is not None
            statement = StateContribution(
                statement.attempt, statement.round, digest_of("other"), 0, statement.contribution
            )
        self.seen[kind] += 1
        self.truth[statement.update] = list(executor.used)
        return Fate(statement, arrives=kind != "vanishes", is_nan=kind == "NaN")


def positions(ranges: list[Span]) -> list[Position]:
    return [(epoch, index, at) for epoch, index, first, end in ranges for at in range(first, end)]


def check_records(chaos: Chaos) -> None:
    job = chaos.job
    weights = None
    taken: list[Position] = []
    for record in job.rounds:
        averaged = [str(peer) for peer in job.server.averaged[record["round"]]]
        assert [member["peer"] for member in record["members"]] == averaged, record["round"]
        for member in record["members"]:
            ranges = [tuple(part) for part in member["ranges"]]
            assert ranges == chaos.truth[member["update"]]
            assert member["samples"] == len(positions(ranges))
            taken += positions(ranges)
        assert weights in (None, record["weights_before"])
        weights = record["weights"]
    assert [record["round"] for record in job.rounds] == list(range(1, len(job.rounds) + 1))
    assert len(set(taken)) == len(taken), "a sample was used twice"
    findings = DilocoFindings()
    audit_records(job.journal, {index: size or 0 for index, size in enumerate(job.dataset.samples)}, findings)
    assert findings.faults == []
    assert findings.samples == len(taken)
    check_ledger(job, set(taken))


def check_ledger(job: Job, used: set[Position]) -> None:
    """Check that every sample of the epochs that have begun is used, free, or in the hands of one worker."""
    running = job.operator._running  # the ledger has no other witness
    if running is None:
        return
    ledger = running.training.slices
    spans = list(ledger.available)
    for peer in [*WORKERS]:
        spans += ledger.held_by(peer)
        for number in range(1, ROUNDS + 2):
            spans += ledger.contribution(peer, number) or ()
    held = [(s.epoch, s.index, at) for s in spans for at in range(s.first, s.end)]
    assert len(set(held)) == len(held), "a sample is in two places"
    assert not used & set(held)
    sizes = [size or 0 for size in job.dataset.samples]
    everything = {
        (epoch, index, at)
        for epoch in range(ledger.epoch + 1)
        for index, size in enumerate(sizes)
        for at in range(size)
    }
    assert used | set(held) == everything, "a sample was lost"


@pytest.mark.parametrize("seed", SEEDS)
async def test_records_are_true_and_the_ledger_is_exact_whatever_happens(seed: int) -> None:
    chaos = Chaos(seed)
    await chaos.run()
    check_records(chaos)
    outcome = chaos.job.outcome or ""
    if outcome == "finished":
        assert len(chaos.job.rounds) == ROUNDS
    else:  # nobody is left, or nobody whose update of the round counts
        assert "remain" in outcome or "0 updates of at least 1" in outcome, outcome


@pytest.mark.nightly
async def test_the_seeds_meet_every_fault_and_most_jobs_finish() -> None:
    seen: Counter[str] = Counter()
    for seed in range(50):
        chaos = Chaos(seed)
        await chaos.run()
        seen.update(chaos.seen)
        seen["finished"] += chaos.job.outcome == "finished"
        seen["excluded"] += len(chaos.job.named("worker_excluded"))
    faults = {"NaN", "vanishes", "foreign ranges", "stale weights", "false digest", "replayed", "repeated", "lost"}
    assert faults | {"missing", "taken up", "resumed", "executor ended"} <= {name for name in seen if seen[name]}
    assert seen["finished"] >= 30, seen
