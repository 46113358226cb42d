"""Between the HTTP side and AIM: posts wait here until they are written, however long AIM is away.

`app` hands a post in and is answered at once; one thread takes posts out in order and writes them through `runs`. A
post leaves only when it has been written, so a failure costs a repetition and no post. The queue is bounded: when it
is full, posts are refused (503) and the scheduler knows that they were not taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

from hypha_aim_driver.app import AimMetrics, SinkFullError

_log = logging.getLogger(__name__)

CAPACITY: Final = 100_000
"""Posts that wait; about half a kilobyte each."""
_BATCH: Final = 256
_RETRY_FIRST: Final = 0.5
_RETRY_LONGEST: Final = 15.0
_SILENCE: Final = 15.0
"""Seconds that one batch may take before it is said that AIM does not answer."""
_IDLE: Final = 5.0


class NotWrittenError(Exception):
    """Metrics could not be written, or it is not known whether they were; writing them again is right."""


class Writer(Protocol):
    """Where the queue leads. Only the delivery's own thread calls it."""

    def write(self, metrics: Sequence[AimMetrics]) -> int:
        """Write the first of `metrics`, one at least, and say how many; writing one a second time changes nothing.

        Raises:
            NotWrittenError: some were perhaps not written.
        """
        ...

    def rest(self) -> None:
        """Nothing has come for some seconds."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Delivery:
    """A sink that writes behind its caller's back, in the order of the posts."""

    def __init__(
        self, writer: Writer, *, capacity: int = CAPACITY, retry: float = _RETRY_FIRST, silence: float = _SILENCE
    ) -> None:
        """Start the thread.

        Args:
            writer: where posts go; `close` closes it.
            capacity: posts that may wait.
            retry: seconds before the first repetition; doubled up to a quarter of a minute.
            silence: seconds that a batch may take before that is reported.
        """
        self._writer = writer
        self._capacity = capacity
        self._retry = retry
        self._silence = silence
        self._waiting: deque[AimMetrics] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._busy_since: float | None = None
        self._working = True
        self._full = False
        self._thread = threading.Thread(target=self._deliver, name="aim-delivery", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Posts that are not written yet."""
        with self._changed:
            return len(self._waiting)

    def record(self, metric: AimMetrics) -> None:
        """See `Sink.record`."""
        with self._changed:
            if self._busy_since is not None and time.monotonic() - self._busy_since > self._silence:
                self._failed(f"no answer for {self._silence:g} s")
            if len(self._waiting) >= self._capacity:
                self._refused()
            self._full = False
            self._waiting.append(metric)
            self._changed.notify()

    def close(self, timeout: float) -> int:
        """Write what waits, for `timeout` seconds at most; the number of posts that could not be written.

        A thread that hangs inside AIM is left behind: it is a daemon.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return self.waiting

    @property
    def hangs(self) -> bool:
        """Whether the thread is still at work."""
        return self._thread.is_alive()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _deliver(self) -> None:
        delay = self._retry
        while batch := self._next():
            if self._attempt(lambda batch=batch: self._written(self._writer.write(batch))):  # type: ignore[misc]
                delay = self._retry
            else:
                self._pause(delay)
                delay = min(2 * delay, _RETRY_LONGEST)
        self._attempt(self._writer.close)

    def _next(self) -> list[AimMetrics]:
        """The next posts, still in the queue; none when there is nothing left and nothing will come."""
        with self._changed:
            while not self._waiting and not self._closing:
                if not self._changed.wait(_IDLE):
                    self._changed.release()
                    try:
                        self._attempt(self._writer.rest)
                    finally:
                        self._changed.acquire()
            return list(islice(self._waiting, _BATCH))

    def _attempt(self, work: Callable[[], None]) -> bool:
        self._busy_since = time.monotonic()
        try:
            work()
        except NotWrittenError as error:
            with self._changed:
                self._failed(str(error))
            return False
        finally:
            self._busy_since = None
        return True

    def _written(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()
            if not self._working:
                _log.info("AIM takes metrics again; %d wait", len(self._waiting))
            self._working = True

    def _pause(self, seconds: float) -> None:
        """Wait; not at all once the delivery is closing, but a little so that repetitions do not spin."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
            closing = self._closing
        if closing:
            time.sleep(min(seconds, self._retry))

    # ---------------------------------------------------------------------------------------------------------- reports

    def _failed(self, why: str) -> None:
        if self._working:
            _log.warning("AIM does not take metrics; they are kept and tried again: %s", why)
        self._working = False

    def _refused(self) -> None:
        if not self._full:
            _log.error("%d metrics wait for AIM and no more fit; new ones are refused", self._capacity)
        self._full = True
        raise SinkFullError(f"{self._capacity} metrics wait for AIM already")
