"""Retry queue: holds metrics until they are written to AIM, however long AIM is unavailable.

`app` adds a metric without waiting; one thread writes metrics in order through `runs`. A metric is removed only after
it was written, so a failure causes a retry and no loss. When the bounded queue is full, new metrics are refused (HTTP
503), and the scheduler keeps and retries them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from hypha_aim_driver.app import AimMetrics, SinkFullError

if TYPE_CHECKING:
    from hypha_aim_driver.runs import JobRuns

_log = logging.getLogger(__name__)

CAPACITY: Final = 100_000
"""Maximum number of queued metrics; each takes about half a kilobyte."""
_BATCH: Final = 256
_RETRY_FIRST: Final = 0.5
_RETRY_LONGEST: Final = 15.0
_STALL_TIMEOUT: Final = 15.0
"""Seconds that writing one batch may take before AIM is reported as unresponsive."""
_IDLE_TIMEOUT: Final = 5.0


class NotWrittenError(Exception):
    """Metrics were not written, or it is unknown whether they were; writing them again is safe."""


@dataclass(slots=True, eq=False)
class RetryQueue:
    """Sink that writes metrics in order on a background thread, which it starts."""

    writer: JobRuns
    """Destination; closed by `close`."""
    capacity: int = CAPACITY
    """Maximum number of queued metrics."""
    retry: float = _RETRY_FIRST
    """Seconds before the first retry; doubled for each further one up to 15 seconds."""
    stall_timeout: float = _STALL_TIMEOUT
    """Seconds that writing a batch may take before a warning is logged."""
    _waiting: deque[AimMetrics] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _busy_since: float | None = None
    _healthy: bool = True
    _full: bool = False
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._write_loop, name="aim-delivery", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of metrics that are not written yet."""
        with self._changed:
            return len(self._waiting)

    def record(self, metric: AimMetrics) -> None:
        """See `app.LogSink.record`."""
        with self._changed:
            if self._busy_since is not None and time.monotonic() - self._busy_since > self.stall_timeout:
                self._report_failure(f"no answer for {self.stall_timeout:g} s")
            if len(self._waiting) >= self.capacity:
                self._raise_full()
            self._full = False
            self._waiting.append(metric)
            self._changed.notify()

    def close(self, timeout: float) -> int:
        """Write the queued metrics for at most `timeout` seconds; return the number of metrics left.

        If the thread is blocked inside AIM, it is abandoned; it is a daemon thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return self.waiting

    @property
    def is_running(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _write_loop(self) -> None:
        delay = self.retry
        while batch := self._next_batch():
            if self._attempt(lambda batch=batch: self._remove_written(self.writer.write(batch))):  # type: ignore[misc]
                delay = self.retry
            else:
                self._pause(delay)
                delay = min(2 * delay, _RETRY_LONGEST)
        self._attempt(self.writer.close)

    def _next_batch(self) -> list[AimMetrics]:
        """Wait for and return the next metrics without removing them; empty once the queue is closed and drained."""
        with self._changed:
            while not self._waiting and not self._closing:
                if not self._changed.wait(_IDLE_TIMEOUT):
                    self._changed.release()
                    try:
                        self._attempt(self.writer.on_idle)
                    finally:
                        self._changed.acquire()
            return list(islice(self._waiting, _BATCH))

    def _attempt(self, work: Callable[[], None]) -> bool:
        self._busy_since = time.monotonic()
        try:
            work()
        except NotWrittenError as error:
            with self._changed:
                self._report_failure(str(error))
            return False
        finally:
            self._busy_since = None
        return True

    def _remove_written(self, count: int) -> None:
        with self._changed:
            for _ in range(count):
                self._waiting.popleft()
            if not self._healthy:
                _log.info("AIM accepts metrics again; %d queued", len(self._waiting))
            self._healthy = True

    def _pause(self, seconds: float) -> None:
        """Wait before a retry; only briefly once the queue is closing, so that retries do not spin."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
            closing = self._closing
        if closing:
            time.sleep(min(seconds, self.retry))

    # ---------------------------------------------------------------------------------------------------------- reports

    def _report_failure(self, why: str) -> None:
        if self._healthy:
            _log.warning("AIM does not accept metrics; they are kept and retried: %s", why)
        self._healthy = False

    def _raise_full(self) -> None:
        if not self._full:
            _log.error("the queue is full (%d metrics), new metrics are refused", self.capacity)
        self._full = True
        raise SinkFullError(f"the queue is full ({self.capacity} metrics)")
