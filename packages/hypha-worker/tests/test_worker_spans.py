"""An executor's spans, from the bridge's socket to a real collector, and the reports that are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.otlp_collector import Collector, http_collector

from hypha_net import instrumentation
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.telemetry import open_export
from hypha_proto.bridge_api import ExecutorSpan, SpanReport
from hypha_worker.bridge import spans as spans_module
from hypha_worker.bridge.spans import SpanRecorder
from hypha_worker.errors import BridgeError

JOB = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
OTHER = JOB.removesuffix("f-01") + "e-01"
STRANGE = "00-fedcba9876543210fedcba9876543210-0123456789abcdef-01"

SCRIPT = """
import os
time.sleep(0.3)
span = {"name": "round", "ago_ms": 250, "duration_ms": 200, "attributes": {"batches": 3, "loss": 0.5, "ok": True}}
span["inside"] = [{"name": "train", "ago_ms": 240, "duration_ms": 100, "error": "no data"}]
answers = [post("/telemetry/spans", {"spans": [span], "traceparent": os.environ.get("TRACEPARENT")})]
for bad in BAD:
    answers.append(post("/telemetry/spans", bad))
print(json.dumps(answers), flush=True)
"""
FINE = {"name": "x", "ago_ms": 1, "duration_ms": 1}
BAD: list[Any] = [
    [],
    {},
    {"spans": [{**FINE, "name": ""}]},
    {"spans": [{**FINE, "name": "x" * 65}]},
    {"spans": [{**FINE, "duration_ms": 2}]},
    {"spans": [{**FINE, "ago_ms": -1}]},
    {"spans": [{**FINE, "ago_ms": 1e9}]},
    {"spans": [{**FINE, "attributes": {"a": [1]}}]},
    {"spans": [{**FINE, "attributes": {"a": 2**63}}]},
    {"spans": [{**FINE, "attributes": {str(n): n for n in range(33)}}]},
    {"spans": [{**FINE, "error": "x" * 301}]},
    {"spans": [FINE] * 257},
    {"spans": [{**FINE, "inside": [{**FINE, "inside": [{**FINE, "inside": [{**FINE, "inside": [FINE]}]}]}]}]},
    {"spans": [FINE], "traceparent": STRANGE},
    {"spans": [FINE], "traceparent": "x" * 65},
]


@contextmanager
def exporting() -> Iterator[Collector]:
    with http_collector() as collector:
        files = {f"{kind}_pem": Path(kind) for kind in ("cert", "key", "trust")}
        keys: dict[str, Any] = {**files, "gateway_addresses": ["/ip4/127.0.0.1/tcp/1"]}
        config = NodeConfig.model_validate({**keys, "telemetry_endpoint": collector.url})
        export = open_export(config, service="hypha-worker", version="1", instance="12D3")
        try:
            yield collector
        finally:
            export.close()


async def test_an_executors_spans_are_in_the_trace_of_its_job(in_lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with exporting() as collector:
        async with in_lab() as lab:
            with instrumentation.span("job"):
                await lab.start(SCRIPT.replace("BAD", repr(BAD)))
            assert (await lab.scheduler.ended()).outcome == "finished"
    [printed] = [record.getMessage() for record in caplog.records if "[[200" in record.getMessage()]
    taken, *refused = json.loads(printed[printed.index("[[") :])
    assert taken == [200, {"recorded": 2}]
    assert len(refused) == len(BAD)
    for bad, (status, answer) in zip(BAD, refused, strict=True):
        assert (status, answer["error"]) == (400, "bad-request"), bad
    spans = {span.name: span for span in collector.spans}
    job, executed, outer, inner = spans["job"], spans["execute task"], spans["round"], spans["train"]
    assert {span.trace_id for span in (job, executed, outer, inner)} == {job.trace_id}
    assert outer.parent_span_id == executed.span_id
    assert inner.parent_span_id == outer.span_id
    assert abs(outer.end_time_unix_nano - outer.start_time_unix_nano - 200e6) < 50e6
    assert executed.start_time_unix_nano < outer.start_time_unix_nano < inner.start_time_unix_nano
    assert inner.end_time_unix_nano < outer.end_time_unix_nano < executed.end_time_unix_nano
    about = {pair.key: pair.value for pair in outer.attributes}
    assert (about["batches"].int_value, about["loss"].double_value, about["ok"].bool_value) == (3, 0.5, True)
    assert about["hypha.executor"].bool_value
    assert (inner.status.code, inner.status.message) == (2, "no data")
    assert "x" not in spans
    # FastAPI traces each request of the bridge if OpenTelemetry's global providers are set
    assert not [name for name in spans if name.startswith(("POST", "fastapi"))]


def report(**changes: Any) -> SpanReport:
    return SpanReport(spans=(ExecutorSpan(name="x", ago_ms=1.0, duration_ms=1.0),) * 3, **changes)


def test_without_a_collector_or_a_trace_spans_are_accepted_and_dropped() -> None:
    clock = iter(range(100)).__next__
    assert SpanRecorder(clock).record(report(), JOB) == 0
    with exporting() as collector:
        assert SpanRecorder(clock).record(report(), None) == 0
        assert SpanRecorder(clock).record(report(traceparent=OTHER), JOB) == 3
        with pytest.raises(BridgeError, match="not one of the job's trace"):
            SpanRecorder(clock).record(report(traceparent=STRANGE), JOB)
    assert {span.parent_span_id.hex() for span in collector.spans} == {OTHER.split("-")[2]}


def test_the_number_of_spans_per_job_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "MAX_SPANS_PER_JOB", 5)
    recorder = SpanRecorder(iter(range(100)).__next__)
    with exporting() as collector:
        assert [recorder.record(report(), JOB) for _ in range(3)] == [3, 2, 0]
    assert len(collector.spans) == 5
