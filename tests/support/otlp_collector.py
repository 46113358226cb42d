"""An OTLP receiver for tests, over HTTP and gRPC, that keeps what it receives as protobuf messages."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from support.fake_http_server import served


@dataclass
class Collector:
    """The received telemetry."""

    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    logs: list[Any] = field(default_factory=list)
    logging: set[str] = field(default_factory=set)
    """Services that sent logs."""
    resources: list[dict[str, str]] = field(default_factory=list)
    services: dict[bytes, str] = field(default_factory=dict)
    """``service.name`` of each span, by its id."""
    metrics_of: dict[str, set[str]] = field(default_factory=dict)
    """Metric names by service."""
    bytes: bytearray = field(default_factory=bytearray)
    """All raw messages, for searching."""
    refuse: str = ""
    """Suffix of the paths that are answered with 404."""
    paths: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""

    def take_traces(self, message: Any) -> None:
        for resource in message.resource_spans:
            service = self._take_resource(resource)
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += spans
            self.services |= {span.span_id: service for span in spans}

    def take_metrics(self, message: Any) -> None:
        for resource in message.resource_metrics:
            service = self._take_resource(resource)
            metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
            self.metrics |= metrics
            self.metrics_of.setdefault(service, set()).update(metrics)

    def take_logs(self, message: Any) -> None:
        for resource in message.resource_logs:
            self.logging.add(self._take_resource(resource))
            self.logs += [record for scope in resource.scope_logs for record in scope.log_records]

    def _take_resource(self, resource: Any) -> str:
        attributes: dict[str, str] = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        self.resources.append(attributes)
        return attributes["service.name"]


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.paths.add(self.path)
            collector.headers |= {key.lower(): value for key, value in self.headers.items()}
            collector.bytes += body
            refused = bool(collector.refuse) and self.path.endswith(collector.refuse)
            if refused:
                pass
            elif self.path.endswith("traces"):
                collector.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path.endswith("metrics"):
                collector.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            else:
                collector.take_logs(logs_service_pb2.ExportLogsServiceRequest.FromString(body))
            self.send_response(404 if refused else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as url:
        collector.url = f"{url}/otlp"
        yield collector


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            collector.bytes += request.SerializeToString()
            collector.take_traces(request)
            collector.headers |= dict(context.invocation_metadata())
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.bytes += request.SerializeToString()
            collector.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    class Logs(logs_service_pb2_grpc.LogsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.bytes += request.SerializeToString()
            collector.take_logs(request)
            return logs_service_pb2.ExportLogsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(), server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        assert server.stop(0).wait(10), "the collector did not end within 10 s"
