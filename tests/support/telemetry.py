"""Spans and metrics of a test, kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from opentelemetry.metrics import NoOpMeter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from hypha_net import instrumentation


class Recorded(SpanProcessor):
    """Everything that is measured, and all spans, in order."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float, dict[str, Any]]] = []
        """Name, value or amount, and attributes of each measurement."""
        self.spans: list[ReadableSpan] = []
        self.gone: set[str] = set()
        """Names of gauges that have forgotten a value."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.spans.append(span)

    def total(self, name: str, **attributes: str) -> float:
        """Return the sum of what was measured; an attribute `hypha.x` is written ``hypha_x``."""
        wanted = {key.replace("_", "."): value for key, value in attributes.items()}
        return sum(value for other, value, about in self.values if other == name and wanted.items() <= about.items())


class _Meter(NoOpMeter):
    """Meter whose instruments append to `Recorded`."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__("test")
        self.recorded = recorded

    def create_counter(self, name: str, *_: str, **_more: object) -> Any:
        return _Instrument(name, self.recorded)

    create_up_down_counter = create_histogram = create_counter


class _Instrument:
    def __init__(self, name: str, recorded: Recorded) -> None:
        self.name, self.recorded = name, recorded

    def add(self, amount: float, attributes: Any) -> None:
        self.recorded.values.append((self.name, amount, dict(attributes)))

    record = add


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record everything that the body measures."""
    recorded = Recorded()

    def set_value(gauge: Any, value: float, attributes: Any = MappingProxyType({})) -> None:
        recorded.values.append((gauge._about[0], value, dict(attributes)))

    def forget(gauge: Any, _attributes: object = None) -> None:
        recorded.gone.add(gauge._about[0])

    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(recorded)
    with patch.multiple(instrumentation.Gauge, set=set_value, forget=forget):
        instrumentation.install(tracers.get_tracer("test"), _Meter(recorded))
        try:
            yield recorded
        finally:
            instrumentation.install()
