"""A real OTLP receiver for tests, over HTTP and gRPC, that keeps what it gets as the protocol's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Collector:
    """What was received."""

    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    resources: list[dict[str, str]] = field(default_factory=list)
    services: dict[bytes, str] = field(default_factory=dict)
    """``service.name`` of each span, by its id."""
    metrics_of: dict[str, set[str]] = field(default_factory=dict)
    """Names of the metrics of each service."""
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
            if self.path.endswith("/v1/traces"):
                collector.take_traces(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            else:
                collector.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}/otlp"
        yield collector
        server.shutdown()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            collector.take_traces(request)
            collector.headers |= dict(context.invocation_metadata())
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(0).wait()
