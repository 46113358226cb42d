"""Share of the time in which workers of different speeds train: with our rounds, and with the same steps for each.

The real rounds of a DiLoCo job (`Rounds`) with simulated workers and a parameter server on a virtual clock. Executors
train on while their reports are on the way: one report is in flight at a time, and states all batches since the one
before. Updates take a different time from each worker to the parameter server.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.training_reports import Continue, Done, ScheduleUpdate
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch
from hypha_scheduler.strategies.diloco.round_effects import AnnounceRound, Effect, RoundSettings
from hypha_scheduler.strategies.diloco.rounds import Rounds

BATCH: Final = 16
"""Samples per batch."""
STEPS: Final = 250
"""Mean number of batches of a worker in a round."""
ROUNDS: Final = 6
MAX_AHEAD: Final = 8
"""Batches beyond the last counted one that an executor trains while it does not know the last of the round."""


@dataclass(frozen=True)
class Costs:
    """Seconds that things take."""

    batches: tuple[float, ...] = (0.25, 0.25, 0.5, 1.0)
    """A batch of each worker, on average."""
    jitter: float = 0.2
    """Fraction by which a batch takes longer or shorter, uniformly distributed."""
    link: float = 0.05
    """A message one way, on average; half to one and a half of it, uniformly distributed."""
    deliveries: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    """Writing an update and sending it to the parameter server, for each worker."""
    step: float = 0.3
    merge: float = 0.2


@dataclass(frozen=True)
class Slowdown:
    """One worker becomes slower for the rest of the job."""

    worker: int = 0
    round: int = 3
    after: int = 100
    """Batches of the round before it."""
    factor: float = 5.0


@dataclass(frozen=True)
class Utilisation:
    """What a job has done."""

    useful: float
    """Time in which workers trained on batches that count, as a share of the time of all workers."""
    seconds: float
    """From the begin of the first batch to the last outer step."""
    suspected: int
    """Number of times that a worker was suspected."""


@dataclass
class _Executor:
    """A worker's executor in a round."""

    number: int
    peer: PeerId
    round: int = 1
    batches: int = 0
    """Batches trained in the round."""
    counted: int = 0
    """Those of them that the scheduler has answered."""
    last: int | None = None
    """Batches of the round after which the update is sent; None while that is not known."""
    unreported: list[MeasuredBatch] = field(default_factory=list)
    is_reporting: bool = False
    is_training: bool = False
    is_over: bool = False
    """Whether its last batch of the round is done."""
    useful: float = 0.0
    """Seconds in which it has trained."""

    def begin(self, fixed: int | None) -> None:
        self.batches = self.counted = 0
        self.last, self.is_over = fixed, False

    @property
    def may_train(self) -> bool:
        if self.is_training or self.is_over:
            return False
        return self.batches < self.counted + MAX_AHEAD if self.last is None else self.batches < self.last


class UnevenJob:
    """One simulated job."""

    def __init__(self, seed: int, costs: Costs, slowdown: Slowdown | None, *, fixed: bool) -> None:
        """Prepare a job; with `fixed` each worker trains `STEPS` batches a round, whatever its speed."""
        self._random = Random(f"uneven/{seed}")
        self._costs = costs
        self._slowdown = slowdown
        self._fixed = STEPS if fixed else None
        count = len(costs.batches)
        peers = [PeerId.from_public_key(bytes([number + 1]) * 32) for number in range(count)]
        self._executors = {peer: _Executor(number, peer) for number, peer in enumerate(peers)}
        self._rounds = Rounds(RoundSettings(ROUNDS, STEPS * BATCH * count, BATCH, count), peers, 0.0)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._slow: set[int] = set()
        self._delivered: set[PeerId] = set()
        self._announced: AnnounceRound | None = None
        self._suspected = 0

    def run(self) -> Utilisation:
        """Run the job to its last outer step."""
        for executor in self._executors.values():
            executor.begin(self._fixed)
            self._rounds.training_began(executor.peer, 0.0)
            self._train(executor)
        while not self._rounds.is_complete:
            at, _, happen = heapq.heappop(self._events)
            self._pass_deadlines(at)
            self._now = at
            happen()
        trained = sum(executor.useful for executor in self._executors.values())
        return Utilisation(trained / (len(self._executors) * self._now), self._now, self._suspected)

    def _pass_deadlines(self, until: float) -> None:
        """Apply deadlines before the next event; a job with fixed steps has none, as no forecast fits it."""
        while self._fixed is None and (due := self._rounds.deadline()) is not None and due < until:
            effects = self._rounds.expire(due)
            self._suspected += sum(
                isinstance(effect, EmitEvent) and effect.name == "worker_suspected" for effect in effects
            )
            self._take(effects)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self._now + seconds, self._scheduled, happen))

    def _spread(self, seconds: float, fraction: float) -> float:
        return seconds * self._random.uniform(1.0 - fraction, 1.0 + fraction)

    # ------------------------------------------------------------------------------------------------------- executors

    def _train(self, executor: _Executor) -> None:
        """Begin the next batch, unless the round is over or too few batches are counted."""
        if executor.may_train:
            executor.is_training = True
            seconds = self._spread(self._costs.batches[executor.number], self._costs.jitter) * self._factor(executor)
            self._after(seconds, lambda: self._finish_batch(executor, seconds))

    def _factor(self, executor: _Executor) -> float:
        slowdown = self._slowdown
        if slowdown is None or executor.number != slowdown.worker:
            return 1.0
        if executor.round == slowdown.round and executor.batches >= slowdown.after:
            self._slow.add(executor.number)
        return slowdown.factor if executor.number in self._slow else 1.0

    def _finish_batch(self, executor: _Executor, seconds: float) -> None:
        executor.is_training = False
        executor.batches += 1
        executor.useful += seconds
        executor.unreported.append(MeasuredBatch(BATCH, seconds))
        self._go_on(executor)

    def _go_on(self, executor: _Executor) -> None:
        """Report what was trained, and train on or send the update."""
        if executor.unreported and not executor.is_reporting:
            executor.is_reporting = True
            batches, executor.unreported = executor.unreported, []
            self._after(self._spread(self._costs.link, 0.5), lambda: self._report(executor, batches))
        is_last = executor.last is not None and executor.batches >= executor.last and not executor.is_training
        if is_last and not executor.is_reporting and not executor.is_over:
            executor.is_over = True
            self._after(self._spread(self._costs.link, 0.5), lambda: self._state_update(executor))
        self._train(executor)

    def _report(self, executor: _Executor, batches: Sequence[MeasuredBatch]) -> None:
        answer = self._rounds.batches_done(executor.peer, batches, self._now)
        self._after(self._spread(self._costs.link, 0.5), lambda: self._take_answer(executor, len(batches), answer))

    def _take_answer(self, executor: _Executor, count: int, answer: object) -> None:
        executor.is_reporting = False
        executor.counted += count
        if isinstance(answer, ScheduleUpdate) and self._fixed is None:
            executor.last = executor.counted + answer.counter
        self._go_on(executor)

    def _state_update(self, executor: _Executor) -> None:
        self._rounds.update_sending(executor.peer, self._now)
        self._take(self._rounds.update_started(executor.peer, self._now))
        self._after(self._costs.deliveries[executor.number], lambda: self._deliver(executor))

    def _deliver(self, executor: _Executor) -> None:
        self._delivered.add(executor.peer)
        number = executor.round
        self._after(
            self._spread(self._costs.link, 0.5),
            lambda: self._take(self._rounds.metrics_reported(executor.peer, number, 1.0, self._now)),
        )
        self._step_if_complete()

    def _merge(self, executor: _Executor) -> None:
        """Merge the outer update, and begin the next round."""
        answer = self._rounds.update_merged(executor.peer, self._now)
        if isinstance(answer, Done):
            return
        assert isinstance(answer, Continue), answer
        executor.round += 1
        executor.begin(self._fixed)
        self._train(executor)

    # ------------------------------------------------------------------------------------------------ parameter server

    def _take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AnnounceRound):
                self._announced = effect
                self._step_if_complete()

    def _step_if_complete(self) -> None:
        announced = self._announced
        if announced is not None and self._delivered.issuperset(peer for peer, _ in announced.members):
            self._announced = None
            self._delivered.clear()
            self._after(self._costs.step, self._commit)

    def _commit(self) -> None:
        self._take(self._rounds.step_committed(self._rounds.closed + 1, self._now))
        for executor in self._executors.values():
            self._after(self._costs.merge, lambda executor=executor: self._merge(executor))  # type: ignore[misc]


def utilisation(
    seed: int, *, costs: Costs | None = None, slowdown: Slowdown | None = None, fixed: bool = False
) -> Utilisation:
    """Run a job; with `fixed` each worker trains the same number of batches a round."""
    return UnevenJob(seed, costs or Costs(), slowdown, fixed=fixed).run()
