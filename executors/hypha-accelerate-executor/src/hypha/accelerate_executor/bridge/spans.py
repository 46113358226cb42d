"""What this executor did and how long it took, for the trace of its job; without OpenTelemetry.

`training` and `loop` name pieces of work as they do them. At the end of a round they are reported over `bridge`, and
the worker records them beside its own. A worker that takes no spans is asked once; a job without a trace reports none.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from hypha.accelerate_executor.errors import ExecutorError
from hypha_proto.bridge_api import MAX_SPANS, ExecutorSpan, SpanReport

logger = logging.getLogger(__name__)

Value = str | int | float | bool
TRACE_VARIABLE: Final = "TRACEPARENT"
"""Names the job's trace in an executor's environment, as W3C writes it."""
_SAMPLED: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")
_ERROR_LIMIT: Final = 300
_MS: Final = 1000.0


@dataclass(slots=True)
class Work:
    """A piece of work that has been begun."""

    name: str
    began: float
    attributes: dict[str, Value]
    ended: float = 0.0
    error: str | None = None
    inside: list[Work] = field(default_factory=list)

    def reported(self, now: float) -> ExecutorSpan:
        """Make a span of it, seen from `now`."""
        ago = (now - self.began) * _MS
        return ExecutorSpan(
            name=self.name,
            ago_ms=ago,
            duration_ms=min(ago, (self.ended - self.began) * _MS),
            attributes=self.attributes,
            error=self.error,
            inside=tuple(work.reported(now) for work in self.inside),
        )


class Spans:
    """Keeps what was done until it is reported. Used by one thread."""

    def __init__(
        self,
        report: Callable[[SpanReport], None],
        traceparent: str | None,
        clean: Callable[[str], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing done.

        Args:
            report: hands a report to the worker; may raise an `ExecutorError`.
            traceparent: the job's, as the worker gave it; without one that is sampled nothing is kept.
            clean: blots secrets out of a text.
            clock: seconds.
        """
        self._report = report
        self._wanted = traceparent is not None and _SAMPLED.fullmatch(traceparent) is not None
        self._clean = clean
        self._clock = clock
        self._open: list[Work] = []
        self._done: list[Work] = []

    @contextmanager
    def span(self, name: str, ago: float = 0.0, /, **attributes: Value) -> Iterator[dict[str, Value]]:
        """Tell of what happens inside; gives its attributes, to which more may be added.

        Args:
            name: of the work.
            ago: seconds for which it has been going on.
            attributes: ``hypha.`` is put before their names.
        """
        named = {f"hypha.{key}": value for key, value in attributes.items()}
        work = Work(name, self._clock() - ago, named)
        holder = self._open[-1].inside if self._open else self._done
        self._open.append(work)
        try:
            yield named
        except Exception as error:
            work.error = self._clean(f"{type(error).__name__}: {error}")[:_ERROR_LIMIT]
            raise
        finally:
            self._open.pop()
            work.ended = self._clock()
            if self._wanted:
                holder.append(work)

    def flush(self) -> None:
        """Report what is over. A worker that does not take it is not asked again: training goes before its tracing."""
        done, self._done = self._done[-MAX_SPANS // 8 :], []
        if not done or not self._wanted:
            return
        now = self._clock()
        try:
            self._report(SpanReport(spans=tuple(work.reported(now) for work in done)))
        except ExecutorError as error:
            logger.info("the worker takes no spans of this executor: %s", error)
            self._wanted = False
