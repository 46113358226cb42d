"""Members that come and go: random jobs on the training state alone, with executors that do as they are told."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_proto.attempt_id import AttemptId
from hypha_proto.contributions import Contribution, SampleRange, StateContribution
from hypha_proto.ids import PeerId
from hypha_proto.progress import (
    BatchDone,
    Done,
    Progress,
    ProgressResponse,
    ScheduleUpdate,
    SendingUpdate,
    UpdateMerged,
)
from hypha_scheduler.strategies.diloco.rounds import (
    AnnounceRound,
    Fail,
    Overdue,
    Rounds,
    RoundSettings,
    StepOverdue,
)
from hypha_scheduler.strategies.diloco.slices import SampleSpan, SliceLedger
from hypha_scheduler.strategies.diloco.timeouts import Timeouts
from hypha_scheduler.strategies.diloco.training_state import Effect, TrainingState

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(1, 6)]
SERVER = PeerId.from_public_key(bytes([98]) * 32)
SIZES = (20, 12, 16)
BATCH = 4
ROUNDS = 8
MINIMUM = 2
Position = tuple[int, int, int]


@dataclass
class Executor:
    """What one executor does next."""

    round: int | None = None
    """Round that it is in; None if it has to join."""
    spans: list[SampleSpan] = field(default_factory=list)
    used: list[SampleSpan] = field(default_factory=list)
    batches: int = 0
    """Batches that it has reported in this round."""
    left: int | None = None
    has_sent: bool = False
    """Whether its update was accepted, and it waits for the outer one."""
    has_joined: bool = False
    """Whether it has joined its round; otherwise it was a member of the one before, or the job began with it."""
    life: int = 0


@dataclass
class Job:
    """A job of which the test plays executors, parameter server and operator."""

    min_members: int = MINIMUM
    now: float = 0.0
    executors: dict[PeerId, Executor] = field(default_factory=dict)
    has_server: bool = True
    announced: AnnounceRound | None = None
    """Last announcement, which the parameter server follows."""
    missing: set[PeerId] = field(default_factory=set)
    """Members that were announced, and whose updates have not arrived."""
    used: list[Position] = field(default_factory=list)
    """Positions in committed rounds."""
    lives: int = 0
    overdue: set[PeerId] = field(default_factory=set)
    stopped: set[PeerId] = field(default_factory=set)
    """Workers that do nothing and answer nothing."""

    def __post_init__(self) -> None:
        timeouts = Timeouts(0, 30.0, 30.0, 30.0)
        limits = RoundSettings(ROUNDS, 12, BATCH, self.min_members, timeouts=timeouts)
        rounds = Rounds(limits, PEERS[:3], self.now)
        rounds.closes_by_commit = True
        self.state = TrainingState(rounds, SliceLedger(SIZES, 0, BATCH), SERVER)
        for peer in PEERS[:3]:
            self.executors[peer] = self.born()

    def born(self) -> Executor:
        self.lives += 1
        return Executor(life=self.lives)

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            assert not isinstance(effect, Fail), effect
            if isinstance(effect, AnnounceRound):
                assert self.has_server
                assert effect.members
                assert effect.round == self.state.rounds.closed + 1
                self.announced = effect
                self.missing -= dict(effect.members).keys()
                self.state.members_agreed(effect.round, [peer for peer, _ in effect.members])
            elif isinstance(effect, Overdue):
                self.overdue.add(effect.peer)
            elif isinstance(effect, StepOverdue):
                self.server(is_there=False)

    def report(self, peer: PeerId, progress: Progress) -> ProgressResponse:
        answer, effects = self.state.report(peer, progress, self.now)
        self.take(effects)
        return answer

    # ---------------------------------------------------------------------------------------------------------- events

    def add(self, peer: PeerId) -> None:
        if peer not in self.executors:
            self.executors[peer] = self.born()
            self.take(self.state.worker_added(peer, self.now))

    def lose(self, peer: PeerId) -> None:
        if self.executors.pop(peer, None) is not None:
            self.overdue.discard(peer)
            self.take(self.state.worker_lost(peer, "power", self.now))

    def restart(self, peer: PeerId) -> None:
        if peer in self.executors:
            self.executors[peer] = self.born()
            self.take(self.state.executor_lost(peer, "killed", self.now))

    def work(self, peer: PeerId) -> None:
        """Let an executor do what is its turn."""
        executor = self.executors.get(peer)
        if executor is None or peer in self.stopped:
            return
        if executor.round is None:
            self.join(peer, executor)
        elif executor.has_sent:
            self.merge(peer, executor)
        elif executor.left is not None and executor.left <= 0:
            self.send(peer, executor)
        else:
            self.train(peer, executor)

    def join(self, peer: PeerId, executor: Executor) -> None:
        answer, effects = self.state.join_round(peer, "blake3:" + "0" * 64, self.now)
        self.take(effects)
        if answer.reason:
            self.executors.pop(peer)
            self.take(self.state.worker_lost(peer, "it is done", self.now))
        elif answer.round is not None:
            assert answer.round == self.state.rounds.closed + 1
            has_joined = executor.life > 3 or answer.round > 1
            self.executors[peer] = Executor(answer.round, has_joined=has_joined, life=executor.life)

    def train(self, peer: PeerId, executor: Executor) -> None:
        wanted, counts = BATCH, dict[str, int]()
        while wanted:
            if not executor.spans:
                span = self.state.slice_for(peer, self.now)
                assert span is not None
                executor.spans.append(span)
            span = executor.spans.pop(0)
            end = min(span.end, span.first + wanted)
            executor.used.append(SampleSpan(span.epoch, span.index, span.first, end))
            counts[str(span.index)] = counts.get(str(span.index), 0) + end - span.first
            wanted -= end - span.first
            if end < span.end:
                executor.spans.insert(0, SampleSpan(span.epoch, span.index, end, span.end))
        self.now += 1.0
        answer = self.report(peer, BatchDone(batch_size=BATCH, slices=counts))
        executor.batches += 1
        if isinstance(answer, Done):
            self.lose(peer)
        elif isinstance(answer, ScheduleUpdate):
            executor.left = answer.counter
        elif executor.left is not None:
            executor.left -= 1

    def send(self, peer: PeerId, executor: Executor) -> None:
        if isinstance(self.report(peer, SendingUpdate()), Done):
            self.lose(peer)
            return
        assert executor.round is not None
        digest = f"blake3:{executor.life:032x}{executor.round:032x}"
        ranges = tuple(SampleRange(s.epoch, s.index, s.first, s.end) for s in executor.used)
        contribution = Contribution(
            round=executor.round, weights=digest, ranges=ranges, batches=executor.batches, batch_size=BATCH,
            seed=1, optimizer="reset", update=digest,
        )  # fmt: skip
        message = StateContribution(AttemptId(uuid.UUID(int=1), "train", 0), executor.round, digest, 0, contribution)
        answer, effects = self.state.state_contribution(peer, message, None, self.now)
        self.take(effects)
        assert answer.accepted or answer.rejoin, answer.reason
        if answer.rejoin:
            self.executors[peer] = Executor(life=executor.life)
        executor.has_sent = answer.accepted

    def merge(self, peer: PeerId, executor: Executor) -> None:
        assert executor.round is not None
        if executor.round > self.state.rounds.closed:
            return
        answer = self.report(peer, UpdateMerged())
        if isinstance(answer, Done):
            self.lose(peer)
            return
        executor.round, executor.has_joined = executor.round + 1, False
        executor.used, executor.left, executor.has_sent, executor.batches = [], None, False, 0

    def step(self) -> None:
        """Let the parameter server average the members that were announced last, and the scheduler record it."""
        announced, closed = self.announced, self.state.rounds.closed
        if announced is None or announced.round != closed + 1:
            return
        members = [peer for peer, _ in announced.members if peer not in self.missing]
        if not members:
            return
        updates, _ = self.state.commit(announced.round, members)
        assert [update.peer for update in updates] == members
        self.used += positions([span for update in updates for span in update.spans])
        self.announced = None
        self.take(self.state.step_committed(announced.round, self.now))

    def miss(self, peer: PeerId) -> None:
        """Let the update of a member whose executor has ended not arrive."""
        announced = self.announced
        executor = self.executors.get(peer)
        if announced is None or peer not in dict(announced.members) or (executor is not None and executor.has_sent):
            return
        self.missing.add(peer)
        self.take(self.state.update_missing(announced.round, peer, "it did not arrive", self.now))

    def server(self, *, is_there: bool) -> None:
        if is_there != self.has_server:
            self.has_server, self.announced = is_there, None
            self.take(self.state.server_changed(SERVER if is_there else None, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(20):
            due = self.state.rounds.deadline()
            if due is None or due > self.now:
                return
            self.take(self.state.expire(self.now))
        raise AssertionError("deadlines stay in the past")

    # ---------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        self.check_ledger()
        rounds = self.state.rounds
        if not self.has_server or rounds.is_complete or rounds.is_announced(rounds.closed + 1):
            return
        open_round = rounds.closed + 1
        trains = [
            peer
            for peer, executor in self.executors.items()
            if executor.round is not None
            and not executor.has_sent
            and not rounds.is_away(peer)
            and (executor.round < open_round or executor.batches or not executor.has_joined)
        ]
        sent = [p for p, executor in self.executors.items() if executor.has_sent and executor.round == open_round]
        behind = [
            p for p, e in self.executors.items() if e.has_sent and e.round != open_round and not rounds.is_away(p)
        ]
        starts = [
            peer
            for peer, executor in self.executors.items()
            if executor.round is None and not rounds.is_preparing(peer) and not rounds.is_away(peer)
        ]  # the workers with which the job begins are waited for
        assert starts or trains or behind or len(sent) < self.min_members, "a round waits for nobody"

    def check_ledger(self) -> None:
        ledger = self.state.slices
        spans = list(ledger.available)
        for peer in PEERS:
            spans += ledger.held_by(peer)
            for number in range(1, ROUNDS + 1):
                spans += ledger.contribution(peer, number) or ()
            self.check_held(peer, positions(list(ledger.held_by(peer))))
        found = positions(spans) + self.used
        assert len(set(found)) == len(found), "a sample is in two places, or was used twice"
        everything = {
            (epoch, index, at)
            for epoch in range(ledger.epoch + 1)
            for index, size in enumerate(SIZES)
            for at in range(size)
        }
        assert set(found) in (everything, set()), "a sample was lost"

    def check_held(self, peer: PeerId, held: list[Position]) -> None:
        """Check that a worker holds what its executor has, and nothing else."""
        executor = self.executors.get(peer)
        if executor is None:
            assert not held, "a worker that is gone holds samples"
        elif executor.round is not None:
            known = executor.spans if executor.has_sent else executor.spans + executor.used
            assert set(held) == set(positions(known))

    def finish(self) -> None:
        """Let a parameter server and enough workers be there, and nothing else happen."""
        self.stopped.clear()
        for _ in range(600):
            if self.state.rounds.over:
                return
            for peer in PEERS:
                if len(self.executors) < self.min_members:
                    self.add(peer)
            for peer in [peer for peer in PEERS if peer in self.overdue]:
                self.lose(peer)
            self.server(is_there=True)
            for peer in list(self.executors):
                self.work(peer)
            for peer in PEERS:
                self.miss(peer)
            self.step()
            self.wait(0.5)
            self.check()
        raise AssertionError(f"the job does not go on: {self.state.rounds.pause_reason}")


def positions(spans: list[SampleSpan]) -> list[Position]:
    return [(span.epoch, span.index, at) for span in spans for at in range(span.first, span.end)]


EVENTS = (
    ["work"] * 12
    + ["step"] * 2
    + ["add", "lose", "restart", "wait", "long wait", "lost", "ready", "miss", "stop", "go"]
)


def happen(job: Job, name: str, peer: PeerId) -> None:
    """Let one event happen."""
    match name:
        case "work":
            job.work(peer)
        case "step":
            job.step()
        case "add":
            job.add(peer)
        case "lose":
            job.lose(peer)
        case "restart":
            job.restart(peer)
        case "wait":
            job.wait(3.0)
        case "long wait":
            job.wait(40.0)
        case "stop":
            job.stopped.add(peer)
        case "go":
            job.stopped.discard(peer)
        case "lost" | "ready":
            job.server(is_there=name == "ready")
        case "miss":
            job.miss(peer)
    job.check()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), minimum=st.integers(1, MINIMUM), length=st.integers(0, 300))
def test_whoever_comes_and_goes_no_sample_is_lost_and_the_job_goes_on(seed: int, minimum: int, length: int) -> None:
    job, chance = Job(minimum), Random(seed)
    for _ in range(length):
        happen(job, chance.choice(EVENTS), chance.choice(PEERS))
    job.finish()
    assert job.state.rounds.closed == ROUNDS
