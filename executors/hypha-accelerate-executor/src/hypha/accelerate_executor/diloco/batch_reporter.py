"""Reports trained batches to the scheduler in the background, while the training loop goes on.

One request is under way at a time; what is trained meanwhile travels in the next one. A batch is kept until the
scheduler has counted it, so that a lost message is sent again. The answer to the report of a process's first batch is
waited for. Shortly before the end of a round a request asks whether that is settled, so that the answer comes in time;
if it comes later, the end of the round waits for it, since it may say that the round lacks more batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from hypha.accelerate_executor.bridge.client import Bridge
from hypha.accelerate_executor.errors import BridgeTimeout
from hypha_proto.batch_reports import MAX_BATCHES, BatchesCounted, TrainedBatches
from hypha_proto.training_reports import Continue, Done, ReportAnswer, ScheduleUpdate, TrainedBatch

logger = logging.getLogger(__name__)

INTERVAL: Final = 0.5
"""Seconds between two requests, once the end of the round is known or while the scheduler is silent: requests cost
processor time that training needs. Shorter near the end, which the scheduler may move as long as it is not settled."""
_LEFT_SHARE: Final = 0.5
"""Longest pause, as a fraction of the time until the end of the round."""
_SHORTEST: Final = 0.1
"""Seconds of a pause near that end, at least; the report of the last batch waits for none."""
_AHEAD_OF_ANSWER: Final = 1.5
"""How long before the end of a round it is settled, as a multiple of the time that answers have taken."""
_LONGEST_AHEAD: Final = 1.0
"""The same in seconds, at most: the scheduler cannot correct a forecast that is settled."""
_LATENCY_DECAY: Final = 0.9
"""Part of the longest time of an answer that still counts at the next one."""
AHEAD: Final = 8
"""Number of batches that may be trained and not counted while the end of the first round is not known."""
AHEAD_SHARE: Final = 0.5
"""The same in later rounds, as a fraction of the batches of the round before."""
FLUSH_SECONDS: Final = 30.0
"""Seconds for which the end of the data waits until the batches are counted."""
SILENCE_SECONDS: Final = 10.0
"""Seconds for which a silent scheduler is waited for at the end of a round, or where that is not known."""
_DROP_SECONDS: Final = 5.0
"""Seconds to wait for an answer that is of no use any more, so that the request does not overtake the next one."""
_MAX_ENTRIES: Final = 10_000
"""Slices in the batches of one request."""


class BatchReporter:
    """The batches of one round at a time.

    Attributes:
        waited: seconds for which its methods have waited in this round.
    """

    def __init__(self, bridge: Bridge, timeout: float) -> None:
        """Report nothing yet.

        Args:
            bridge: takes the reports.
            timeout: seconds for which `report` waits for an answer.
        """
        self.waited = 0.0
        self._bridge = bridge
        self._timeout = timeout
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        """Sends the reports; None before the first one is answered."""
        self._under_way = False
        self._is_closed = False
        self._failure: Exception | None = None
        self._ahead = AHEAD
        self._latency = 0.0
        """Seconds that the last answers have taken, at most."""
        self._generation = 0
        """Grows whenever batches are given up: answers about those before are of no use."""
        self._reset(0)

    def _reset(self, number: int) -> None:
        self._generation += 1
        self._round = number
        self._began_at = self._trained_at = time.monotonic()
        """Begin of the round, and the end of its last batch."""
        self._kept: deque[TrainedBatch] = deque()
        """Batches that are not counted."""
        self._first = 0
        """Number of batches before them."""
        self._last: int | None = None
        """Number of batches after which the round ends, if it is known."""
        self._settled: int | None = None
        """The same, if the scheduler will not change it."""
        self._is_done = False
        """Whether the job needs the executor no more."""
        self._is_silent = False
        """Whether the last request was answered without the scheduler."""
        self._silent_since = 0.0
        """Time since which it is silent, if it is."""
        self._hurries = False
        """Whether `flush` waits."""
        self._not_before = 0.0
        """Time before which no request is sent, unless the batches are complete or `flush` waits for it."""

    @property
    def _trained(self) -> int:
        return self._first + len(self._kept)

    def begin(self, number: int) -> None:
        """Begin a round."""
        self.drop()
        with self._changed:
            self._reset(number)
        self.waited = 0.0

    def drop(self) -> None:
        """Give up what was not counted."""
        with self._changed:
            if self._last is not None:
                self._ahead = max(1, min(MAX_BATCHES, int(AHEAD_SHARE * self._last)))
            self._reset(0)
            self._changed.wait_for(lambda: not self._under_way, _DROP_SECONDS)

    def report(self, batch: TrainedBatch) -> ReportAnswer:
        """Hand a batch over; return what the scheduler has answered last, counted from this batch.

        Waits as long as too many batches are not counted.

        Raises:
            ExecutorError: a request has failed, or the scheduler has refused it.
        """
        if self._thread is None:
            self._report_first(batch)
        else:
            self._hand_over(batch)
        return self._current()

    def _report_first(self, batch: TrainedBatch) -> None:
        """Report the first batch and wait for the answer, since a first round may be short."""
        began = time.perf_counter()
        trained = TrainedBatches(round=self._round, first=0, batches=(batch,))
        answer = self._bridge.report_batches(trained)
        self.waited += time.perf_counter() - began
        with self._changed:
            self._keep(batch)
            self._apply(trained, answer)
        self._thread = threading.Thread(target=self._run, name="batch-reporter", daemon=True)
        self._thread.start()

    def _hand_over(self, batch: TrainedBatch) -> None:
        with self._changed:
            self._keep(batch)
            if len(self._kept) == 1 or self._is_complete:  # else its thread knows when the next request is due
                self._changed.notify_all()
            if not self._wait(self._may_go_on, self._timeout):
                raise BridgeTimeout(f"the worker did not answer a report within {self._timeout:g} s")

    def _keep(self, batch: TrainedBatch) -> None:
        self._kept.append(batch)
        self._trained_at = time.monotonic()

    def _may_go_on(self) -> bool:
        if self._last is not None or self._is_done or len(self._kept) <= self._ahead:
            return True
        return self._is_silent and time.monotonic() - self._silent_since >= SILENCE_SECONDS

    def _wait(self, is_met: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition or a failure, which is raised; return whether it is met in time."""
        began = time.perf_counter()
        found = self._changed.wait_for(lambda: self._failure is not None or is_met(), seconds)
        self.waited += time.perf_counter() - began
        if self._failure is not None:
            raise self._failure
        return found

    def _current(self) -> ReportAnswer:
        with self._changed:
            if self._is_done:
                return Done()
            return Continue() if self._last is None else ScheduleUpdate(counter=max(0, self._last - self._trained))

    def flush(self) -> ReportAnswer:
        """Wait until all batches are counted, unless the scheduler is silent; return what `report` does.

        Raises:
            ExecutorError: a request has failed, or the scheduler has refused it.
        """
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            if not self._wait(lambda: not self._kept or self._is_done or self._is_silent, FLUSH_SECONDS):
                logger.warning("%d batches of round %d were not counted in time", len(self._kept), self._round)
            self._hurries = False
        return self._current()

    def confirm_end(self, *, counted: bool) -> ReportAnswer:
        """Wait until the scheduler has settled that the last batch is trained; return what `report` does.

        A scheduler that is silent is asked again for a while; then the last batch that is known stays the last one.

        Args:
            counted: whether all batches have to be counted, too: of an update that does not state them.

        Raises:
            ExecutorError: a request has failed, or the scheduler has refused it.
        """

        def is_confirmed() -> bool:
            return not self._kept or self._is_done or (self._settled == self._last and not counted)

        with self._changed:
            if not self._wait(is_confirmed, SILENCE_SECONDS):
                logger.warning("the scheduler has not confirmed the end of round %d in time", self._round)
        return self._current()

    def close(self) -> None:
        """Report nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        while (request := self._next_request()) is not None:
            trained, generation = request
            began = time.monotonic()
            try:
                answer = self._bridge.report_batches(trained)
            except Exception as error:  # noqa: BLE001 - `report` and `flush` raise it
                self._fail(error)
                return
            self._latency = max(time.monotonic() - began, _LATENCY_DECAY * self._latency)
            self._take(trained, answer, generation)

    def _next_request(self) -> tuple[TrainedBatches, int] | None:
        """Wait until there is something to report; return it with its generation, or None when this is closed."""
        with self._changed:
            while not self._is_closed:
                pause = self._due_at() - time.monotonic()
                if self._kept and pause <= 0.0:
                    self._under_way = True
                    return self._request(), self._generation
                self._changed.wait(pause if self._kept else None)
            return None

    def _request(self) -> TrainedBatches:
        """Return the next request; near the end of the round it asks whether that is settled."""
        batches, settles_at = self._oldest(), self._settles_at
        is_near = settles_at is not None and time.monotonic() >= settles_at
        return TrainedBatches(
            round=self._round, first=self._first, batches=batches, last=self._last, settles=is_near or None
        )

    def _due_at(self) -> float:
        """Return when the next request leaves: the one that settles the end takes the place of one just before."""
        if (self._hurries or self._is_complete) and not self._is_silent:
            return 0.0
        settles_at = None if self._is_silent else self._settles_at
        if settles_at is None or self._not_before < settles_at - _SHORTEST:
            return self._not_before
        return settles_at

    @property
    def _is_complete(self) -> bool:
        """Whether all batches of the round are trained, as far as is known."""
        return self._last is not None and self._trained >= self._last

    @property
    def _settles_at(self) -> float | None:
        """Time at which to ask whether the end is settled; None if it is, or is not known."""
        if self._last is None or self._settled == self._last:
            return None
        ends_at = self._trained_at + self._batches_left * self._seconds_per_batch
        return ends_at - min(_LONGEST_AHEAD, _AHEAD_OF_ANSWER * self._latency)

    @property
    def _batches_left(self) -> int:
        return max(0, (self._last or 0) - self._trained)

    @property
    def _seconds_per_batch(self) -> float:
        return (self._trained_at - self._began_at) / max(1, self._trained)

    def _oldest(self) -> tuple[TrainedBatch, ...]:
        """Return as many of the oldest batches as one request may hold."""
        found: list[TrainedBatch] = []
        entries = 0
        for batch in self._kept:
            entries += len(batch.slices or ())
            if found and (len(found) >= MAX_BATCHES or entries > _MAX_ENTRIES):
                break
            found.append(batch)
        return tuple(found)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure, self._under_way = error, False
            self._changed.notify_all()

    def _take(self, trained: TrainedBatches, answer: BatchesCounted, generation: int) -> None:
        """Apply the answer to a request, unless its batches were given up meanwhile."""
        with self._changed:
            self._under_way = False
            if generation == self._generation:
                self._apply(trained, answer)
            self._changed.notify_all()

    def _apply(self, trained: TrainedBatches, answer: BatchesCounted) -> None:
        """Forget the batches that are counted, and note when the round ends."""
        is_silent = answer.counted <= trained.first and not answer.done
        self._silent_since = self._silent_since if self._is_silent else time.monotonic()
        self._is_silent = is_silent
        counted = max(self._first, min(answer.counted, self._trained))
        for _ in range(counted - self._first):
            self._kept.popleft()
        self._first = counted
        self._last = self._last if answer.last is None else answer.last
        if trained.settles and answer.last == trained.last:
            self._settled = answer.last
        self._is_done = self._is_done or bool(answer.done)
        self._not_before = time.monotonic() + self._pause()

    def _pause(self) -> float:
        """Return how many seconds pass before the next request, unless the scheduler's answer is waited for."""
        if self._is_silent:
            return INTERVAL
        if self._last is None or not self._trained:
            return 0.0
        return min(INTERVAL, max(_SHORTEST, _LEFT_SHARE * self._batches_left * self._seconds_per_batch))
