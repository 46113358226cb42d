"""Batches are reported in the background: what travels together, what is sent again, and when training waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hypha.accelerate_executor import training
from hypha.accelerate_executor.diloco import batch_reporter
from hypha.accelerate_executor.diloco.batch_reporter import AHEAD, BatchReporter
from hypha.accelerate_executor.errors import BridgeClosed, BridgeTimeout, SchedulerRefused
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.training_reports import Continue, Done, ReportAnswer, ScheduleUpdate, TrainedBatch

pytestmark = pytest.mark.timeout(180)  # some tests fill all processors meanwhile

BATCH = TrainedBatch(batch_size=4, slices={"3": 4}, batch_ms=1.0, wait_ms=0.0)
WAIT = 20.0
"""Seconds after which something that should happen has not happened."""


@dataclass
class FakeBridge:
    """A worker that answers a request when the test says how."""

    requests: queue.Queue[TrainedBatches] = field(default_factory=queue.Queue)
    answers: queue.Queue[BatchesCounted | Exception] = field(default_factory=queue.Queue)

    def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        self.requests.put(trained)
        answer = self.answers.get(timeout=WAIT)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def next(self) -> tuple[int, int, int]:
        """Return round, position and number of batches of the next request."""
        trained = self.requests.get(timeout=WAIT)
        return trained.round, trained.first, len(trained.batches)


@dataclass
class Scene:
    bridge: FakeBridge
    reporter: BatchReporter

    def begin(self, number: int = 1, last: int | None = None) -> None:
        """Begin the first round, of which the first batch is answered with its end."""
        self.reporter.begin(number)
        self.bridge.answers.put(BatchesCounted(counted=1, last=last))
        self.reporter.report(BATCH)
        assert self.bridge.next() == (number, 0, 1)

    def train(self, count: int) -> list[ReportAnswer]:
        return [self.reporter.report(BATCH) for _ in range(count)]

    def answer(self, counted: int, last: int | None = None, **more: Any) -> None:
        self.bridge.answers.put(BatchesCounted(counted=counted, last=last, **more))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(batch_reporter, "INTERVAL", 0.0)
    bridge = FakeBridge()
    found = Scene(bridge, BatchReporter(bridge, WAIT))  # type: ignore[arg-type]
    yield found
    found.reporter.close()
    bridge.answers.put(BridgeClosed("the test is over"))


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run something in a thread; return a function that waits for its result."""
    found: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: found.put(work()), daemon=True).start()
    return lambda: found.get(timeout=WAIT)


def test_what_is_trained_while_a_request_is_under_way_travels_in_the_next_one(scene: Scene) -> None:
    scene.begin(last=100)
    scene.train(1)
    assert scene.bridge.next() == (1, 1, 1)
    scene.train(5)
    scene.answer(2, 100)
    assert scene.bridge.next() == (1, 2, 5)
    scene.answer(7, 100)
    assert scene.reporter.flush() == ScheduleUpdate(counter=93)


def test_the_end_counts_from_the_first_batch_whenever_the_answer_comes(scene: Scene) -> None:
    scene.begin()
    assert scene.train(3)[-1] == Continue()
    assert scene.bridge.next()[1] == 1
    scene.answer(2, last=10)
    assert scene.bridge.next()[:2] == (1, 2)
    assert scene.train(1) == [ScheduleUpdate(counter=5)]
    assert scene.train(6)[-2:] == [ScheduleUpdate(counter=0), ScheduleUpdate(counter=0)]


def test_batches_that_were_not_counted_are_sent_again(scene: Scene) -> None:
    scene.begin(last=100)
    scene.train(1)
    assert scene.bridge.next() == (1, 1, 1)
    scene.train(2)
    scene.answer(1)  # the scheduler was silent
    assert scene.bridge.next() == (1, 1, 3)
    scene.answer(3, 100)
    assert scene.bridge.next() == (1, 3, 1)
    scene.answer(4, 100)
    assert scene.reporter.flush() == ScheduleUpdate(counter=96)


def test_training_goes_on_a_few_batches_ahead_while_the_end_is_not_known(scene: Scene) -> None:
    scene.begin()
    scene.train(AHEAD)
    assert scene.bridge.next()[1] == 1
    blocked = in_thread(lambda: scene.reporter.report(BATCH))
    scene.answer(2)
    assert scene.bridge.next()[1] == 2, "the answer lets training go on and the next request leave"
    assert blocked() == Continue()


def test_a_scheduler_that_is_silent_for_long_holds_nothing_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reporter, "SILENCE_SECONDS", 0.0)
    scene.begin()
    scene.train(1)
    assert scene.bridge.next()[1] == 1
    scene.answer(1)
    assert scene.bridge.next()[1] == 1
    assert scene.train(5 * AHEAD) == [Continue()] * 5 * AHEAD
    assert scene.reporter.flush() == Continue()


def test_after_its_last_batch_a_worker_trains_on_if_the_answer_says_so(scene: Scene) -> None:
    scene.begin(last=2)
    assert scene.train(1) == [ScheduleUpdate(counter=0)]
    asked = scene.bridge.requests.get(timeout=WAIT)
    assert (asked.first, len(asked.batches), asked.last) == (1, 1, 2)
    scene.answer(2, last=4)
    assert scene.reporter.confirm_end(counted=False) == ScheduleUpdate(counter=2)
    scene.answer(3, last=4)
    scene.answer(4, last=4)
    scene.train(2)
    assert scene.reporter.confirm_end(counted=False) == ScheduleUpdate(counter=0)


def test_a_silent_scheduler_is_asked_again_for_the_end_of_a_round(scene: Scene) -> None:
    scene.begin(last=2)
    scene.train(1)
    assert scene.bridge.next() == (1, 1, 1)
    scene.answer(1)
    scene.answer(2, last=3)
    assert scene.reporter.confirm_end(counted=False) == ScheduleUpdate(counter=1)
    assert scene.bridge.next() == (1, 1, 1)


def test_without_an_answer_in_time_the_last_known_batch_is_the_last(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reporter, "SILENCE_SECONDS", 0.01)
    scene.begin(last=2)
    scene.train(1)
    assert scene.reporter.confirm_end(counted=False) == ScheduleUpdate(counter=0)


def test_in_later_rounds_training_goes_on_for_half_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reporter, "INTERVAL", 0.0)
    bridge = FakeBridge()
    scene = Scene(bridge, BatchReporter(bridge, 0.01))  # type: ignore[arg-type]
    scene.begin(last=6)
    scene.reporter.flush()
    scene.reporter.begin(2)
    assert scene.train(3) == [Continue()] * 3
    with pytest.raises(BridgeTimeout):
        scene.train(1)
    scene.reporter.close()
    bridge.answers.put(BridgeClosed("the test is over"))


def test_reports_become_more_frequent_towards_the_end_of_a_round(clock: list[float]) -> None:
    bridge = FakeBridge()
    scene = Scene(bridge, BatchReporter(bridge, WAIT))  # type: ignore[arg-type]
    scene.reporter.begin(1)
    pauses = []
    for counted in range(1, 11):
        clock[0] = 100.0 + 0.1 * counted  # 0.1 s a batch
        scene.answer(counted, last=10)
        scene.train(1)
        scene.reporter.flush()
        pauses.append(round(scene.reporter._not_before - clock[0], 6))
    assert pauses == [0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.1]
    scene.answer(11, last=10_000)
    scene.train(1)
    scene.reporter.flush()
    assert scene.reporter._not_before == clock[0] + batch_reporter.INTERVAL
    scene.reporter.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the reporter's clock."""
    now = [100.0]
    monkeypatch.setattr(batch_reporter, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: 0.0))
    return now


@pytest.mark.parametrize("counted", [False, True], ids=["the update states its batches", "it does not"])
def test_an_end_that_is_settled_in_time_is_not_waited_for(scene: Scene, clock: list[float], counted: bool) -> None:
    asked = settle(scene, clock)
    assert (asked.first, len(asked.batches), asked.last, asked.settles) == (2, 1, 4, True)
    scene.train(1)
    confirmed = in_thread(lambda: scene.reporter.confirm_end(counted=counted))
    scene.answer(3, last=4)
    assert scene.bridge.next() == (1, 3, 1), "the last batch is reported, too"
    if counted:
        scene.answer(4, last=4)
    assert confirmed() == ScheduleUpdate(counter=0)


def test_an_end_that_is_moved_is_not_settled(scene: Scene, clock: list[float]) -> None:
    settle(scene, clock)
    scene.answer(3, last=5)
    scene.train(2)
    scene.answer(5, last=6)
    assert scene.reporter.confirm_end(counted=False) == ScheduleUpdate(counter=1)


def test_an_answer_that_took_long_settles_nothing_early(scene: Scene, clock: list[float]) -> None:
    scene.reporter.begin(1)
    clock[0] += 0.1
    scene.answer(1, last=400)
    scene.train(2)
    assert [scene.bridge.next(), scene.bridge.next()] == [(1, 0, 1), (1, 1, 1)]
    clock[0] += 30.0
    scene.train(300)
    scene.answer(2, last=400)
    assert scene.bridge.requests.get(timeout=WAIT).settles is None, "98 batches of 0.1 s are left"


def settle(scene: Scene, clock: list[float]) -> TrainedBatches:
    """Train three of four batches of 0.1 s, whose reports take as long; return the request that is under way then."""
    scene.reporter.begin(1)
    clock[0] += 0.1
    scene.answer(1, last=4)
    scene.train(1)
    clock[0] += 0.1
    scene.train(1)
    assert scene.bridge.next() == (1, 0, 1)
    early = scene.bridge.requests.get(timeout=WAIT)
    assert (early.first, len(early.batches), early.settles) == (1, 1, None)
    clock[0] += 0.1
    scene.train(1)
    scene.answer(2, last=4)
    return scene.bridge.requests.get(timeout=WAIT)


def test_a_failure_ends_training_at_the_next_batch(scene: Scene) -> None:
    scene.begin()
    scene.train(1)
    scene.bridge.answers.put(SchedulerRefused("the scheduler refused the batches"))
    with pytest.raises(SchedulerRefused):
        scene.reporter.flush()
    with pytest.raises(SchedulerRefused):
        scene.train(1)


def test_a_job_that_needs_the_executor_no_more_ends_it(scene: Scene) -> None:
    scene.begin()
    scene.train(1)
    scene.answer(2, done=True)
    assert scene.reporter.flush() == Done()
    assert scene.train(1) == [Done()]


def test_answers_about_a_round_that_was_given_up_are_ignored(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reporter, "_DROP_SECONDS", 0.0)
    scene.begin()
    scene.train(3)
    assert scene.bridge.next()[:2] == (1, 1)
    scene.reporter.begin(1)  # the executor has joined the same round anew
    scene.train(1)
    scene.answer(4, last=4)
    assert scene.bridge.next() == (1, 0, 1)
    scene.answer(1)
    assert scene.reporter.flush() == Continue()


def test_training_waits_for_an_answer_as_long_as_the_bridge_may_take() -> None:
    bridge = FakeBridge()
    scene = Scene(bridge, BatchReporter(bridge, 0.01))  # type: ignore[arg-type]
    scene.begin()
    scene.train(AHEAD)
    before = scene.reporter.waited
    with pytest.raises(BridgeTimeout):
        scene.train(1)
    assert scene.reporter.waited >= before + 0.01
    scene.reporter.close()
    bridge.answers.put(BridgeClosed("the test is over"))


def test_a_round_has_the_batches_that_are_allocated_at_its_last_one(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=1, batches=6, late_batches=2)
    assert training.main(worker.arguments()) == 0
    assert worker.counted == [6]
