"""Spans of the executor's work for the job's trace, without OpenTelemetry.

`training` and `diloco.loop` open spans; they are reported over `bridge` at the end of each round, and the worker
records them beside its own. A worker that rejects spans is not asked again; a job without a trace reports none.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from hypha.accelerate_executor.errors import ExecutorError
from hypha_proto.bridge_api import MAX_SPANS, ExecutorSpan, SpanReport
from hypha_proto.texts import shorten

logger = logging.getLogger(__name__)

Value = str | int | float | bool
TRACE_VARIABLE: Final = "TRACEPARENT"
"""Environment variable with the job's trace in W3C Trace Context format (https://www.w3.org/TR/trace-context/)."""
_SAMPLED: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")
_ERROR_LIMIT: Final = 300
_MS: Final = 1000.0


@dataclass(slots=True)
class OpenSpan:
    """An open span."""

    name: str
    began: float
    attributes: dict[str, Value]
    ended: float = 0.0
    error: str | None = None
    inside: list[OpenSpan] = field(default_factory=list)

    def reported(self, now: float) -> ExecutorSpan:
        """Return the span relative to `now`."""
        ago = (now - self.began) * _MS
        return ExecutorSpan(
            name=self.name,
            ago_ms=ago,
            duration_ms=min(ago, (self.ended - self.began) * _MS),
            attributes=self.attributes,
            error=self.error,
            inside=tuple(work.reported(now) for work in self.inside),
        )


class _OpenSpans(threading.local):
    """The open spans of a thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[OpenSpan] = []


class Spans:
    """Buffers ended spans until they are reported. A span is inside another one of the same thread."""

    def __init__(
        self,
        report: Callable[[SpanReport], None],
        traceparent: str | None,
        clean: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with an empty buffer.

        Args:
            report: sends a report to the worker; may raise an `ExecutorError`.
            traceparent: the job's, from the worker; nothing is recorded unless it is sampled.
            clean: redacts secrets in a text.
            clock: returns seconds.
        """
        self._report = report
        self._wanted = traceparent is not None and _SAMPLED.fullmatch(traceparent) is not None
        self._clean = clean
        self._clock = clock
        self._open = _OpenSpans()
        self._done: list[OpenSpan] = []
        self._lock = threading.Lock()
        """Held while `_done` changes."""

    @contextmanager
    def span(self, name: str, ago: float = 0.0, /, **attributes: Value) -> Iterator[dict[str, Value]]:
        """Record a span of the context; yields its attributes, which may be extended.

        Args:
            name: name of the span.
            ago: seconds since it started.
            attributes: their names are prefixed with ``hypha.``.
        """
        named = {f"hypha.{key}": value for key, value in attributes.items()}
        work = OpenSpan(name, self._clock() - ago, named)
        opened = self._open.stack
        opened.append(work)
        try:
            yield named
        except Exception as error:
            work.error = shorten(self._clean(f"{type(error).__name__}: {error}"), _ERROR_LIMIT)
            raise
        finally:
            opened.pop()
            work.ended = self._clock()
            if self._wanted:
                with self._lock:
                    (opened[-1].inside if opened else self._done).append(work)

    def flush(self) -> None:
        """Report ended spans. A worker that rejects them is not asked again: training has priority over tracing."""
        with self._lock:
            done, self._done = self._done[-MAX_SPANS // 8 :], []
        if not done or not self._wanted:
            return
        now = self._clock()
        try:
            self._report(SpanReport(spans=tuple(work.reported(now) for work in done)))
        except ExecutorError as error:
            logger.info("the worker takes no spans of this executor: %s", error)
            self._wanted = False
