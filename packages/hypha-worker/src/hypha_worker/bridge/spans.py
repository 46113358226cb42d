"""Records an executor's spans in the trace of its job.

An executor needs neither OpenTelemetry nor a synchronised clock: it reports spans after they ended, each with how long
ago it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_proto.bridge_api import ExecutorSpan, SpanReport
from hypha_worker.errors import bad_request

MAX_SPANS_PER_JOB: Final = 20_000
"""Further spans are accepted and not recorded."""
_MS: Final = 1000.0


@dataclass(slots=True)
class SpanRecorder:
    """Checks and records the spans of one job's executor."""

    clock: Callable[[], float] = anyio.current_time
    _recorded: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def record(self, report: SpanReport, job: str | None) -> int:
        """Record a report under the job's span; return how many spans were recorded.

        Args:
            job: ``traceparent`` of the job's execution; None if it belongs to no trace.

        Raises:
            BridgeError: a span began before the job, or names a trace that is not the job's.
        """
        longest = (self.clock() - self._started) * _MS
        for span in _flatten(report.spans):
            if span.ago_ms > longest:
                raise bad_request(
                    f"spans: {span.name!r} began {span.ago_ms:g} ms ago, before the job ({longest:.0f} ms)"
                )
        parent = report.traceparent or job
        if (
            report.traceparent is not None
            and job is not None
            and not instrumentation.same_trace(report.traceparent, job)
        ):
            raise bad_request("spans: traceparent is not one of the job's trace, which TRACEPARENT names")
        if job is None or not instrumentation.enabled():
            return 0
        before = self._recorded
        self._record(report.spans, parent)
        return self._recorded - before

    def _record(self, spans: Sequence[ExecutorSpan], parent: str | None) -> None:
        for span in spans:
            if self._recorded >= MAX_SPANS_PER_JOB:
                return
            self._recorded += 1
            ago, seconds = span.ago_ms / _MS, span.duration_ms / _MS
            about = {"hypha.executor": True, **span.attributes}
            own = instrumentation.record(span.name, about, parent=parent, ago=ago, seconds=seconds, error=span.error)
            self._record(span.inside, own)


def _flatten(spans: Sequence[ExecutorSpan]) -> list[ExecutorSpan]:
    return [span for outer in spans for span in (outer, *_flatten(outer.inside))]
