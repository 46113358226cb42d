"""A job over real processes is one trace at the collector, and the documented metrics arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import local_network
from support.otlp_collector import Collector, grpc_collector, http_collector

import hypha_local.processes

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(300)]

SPANS = {
    "hypha-scheduler": {"job", "advertise", "lease", "dispatch", "WorkerOffer", "Data", "receive outer-update"},
    "hypha-worker": {
        "evaluate",
        "offer",
        "RenewLease",
        "execute task",
        "fetch",
        "fetch slices",
        "send pseudo-gradient",
        "receive pseudo-gradient",
        "outer step",
        "send outer update",
        "receive outer-update",
        "report",
        "start executor",
        "load model",
        "round",
        "train",
        "write pseudo-gradient",
        "wait for outer update",
        "merge outer update",
    },
    "hypha-data": {"give file"},
    "hypha-gateway": {"pass request on"},
}
METRICS = {
    "hypha-scheduler": {
        "hypha.scheduler.jobs.active",
        "hypha.scheduler.jobs.ended",
        "hypha.scheduler.leases.active",
        "hypha.scheduler.lease.renewals",
        "hypha.scheduler.offers",
        "hypha.scheduler.round.duration",
        "hypha.scheduler.samples",
    },
    "hypha-worker": {
        "hypha.worker.tasks.active",
        "hypha.worker.tasks.started",
        "hypha.worker.tasks.ended",
        "hypha.worker.task.duration",
        "hypha.worker.executors.active",
        "hypha.worker.executors.ended",
        "hypha.worker.executor.processes",
        "process.cpu.time",
        "process.memory.usage",
        "process.disk.io",
        "hypha.worker.requests",
        "hypha.worker.leases.active",
        "hypha.worker.lease.renewals",
        "hypha.worker.lease.ends",
        "hypha.worker.slices",
        "hypha.worker.slice.io",
        "hypha.worker.slice.duration",
        "hypha.worker.prefetch.depth",
        "hypha.worker.samples",
        "hypha.worker.outer_step.duration",
        "hypha.transfer.io",
    },
    "hypha-data": {"hypha.data.slices", "hypha.transfer.io"},
    "hypha-gateway": {"hypha.gateway.requests", "hypha.peers.connected"},
}


@pytest.fixture(params=["http/protobuf", "grpc"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Run a collector to which every process of a local network exports; metrics once a second."""
    inherited = hypha_local.processes.child_environment

    def environment(*args: Any) -> dict[str, str]:
        exports = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
        return {**inherited(*args), **exports, "OTEL_EXPORTER_OTLP_PROTOCOL": request.param}

    receiver = grpc_collector if request.param == "grpc" else http_collector
    with receiver() as collector:
        monkeypatch.setattr(hypha_local.processes, "child_environment", environment)
        yield collector


def test_a_job_is_one_trace_over_processes(collector: Collector, tmp_path: Path) -> None:
    with local_network.local_network(tmp_path / "run", workers=2) as network:
        job = network.job(rounds=24)  # long enough for leases to be renewed, which happens after 3.3 s
        assert job.wait(200) == 0, job.log
    [root] = [span for span in collector.spans if span.name == "job"]
    spans = {span.span_id: span for span in collector.spans if span.trace_id == root.trace_id}
    assert all(span.parent_span_id in spans for span in spans.values() if span is not spans[root.span_id])
    found: dict[str, set[str]] = {}
    for span in spans.values():
        found.setdefault(collector.services[span.span_id], set()).add(span.name)
    for service, names in SPANS.items():
        assert names <= found[service], names - found[service]
    for service, names in METRICS.items():
        assert names <= collector.metrics_of[service], names - collector.metrics_of[service]
    assert {record.trace_id for record in collector.logs} >= {root.trace_id}
    assert set(SPANS) <= collector.logging
    assert lineage(spans, "outer step") == [
        "outer step",
        "execute task",
        "dispatch",
        "job",
    ]
    assert lineage(spans, "offer") == ["offer", "evaluate", "advertise", "job"]
    assert lineage(spans, "train")[:4] == ["train", "round", "execute task", "dispatch"]
    assert lineage(spans, "receive pseudo-gradient")[:3] == [
        "receive pseudo-gradient",
        "send pseudo-gradient",
        "execute task",
    ]


def lineage(spans: dict[bytes, Any], name: str) -> list[str]:
    """Return the names from the span of that name up to the root."""
    span = next(span for span in spans.values() if span.name == name)
    names = [span.name]
    while span.parent_span_id:
        span = spans[span.parent_span_id]
        names.append(span.name)
    return names
