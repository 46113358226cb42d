"""Export to OpenTelemetry collectors over both protocols, including collectors that hang or are unavailable."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.otlp_collector import Collector, grpc_collector, http_collector
from support.process_ready import first_line
from support.waiting import run, wait_until

from hypha_net import instrumentation, rpc
from hypha_net.node.config.loader import ConfigError, load_config
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.config.otlp import targets
from hypha_net.node.telemetry import Export, open_export
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, RenewalFailed, RenewLease

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
WORK = instrumentation.Counter("test.work", "{piece}", "Work that was done.")
SPEED = instrumentation.Histogram("test.speed", "s", "How long it took.")
ROOM = instrumentation.Level("test.room", "By", "Bytes in use.")


@contextmanager
def hanging_collector() -> Iterator[str]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def absent_collector() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.fixture
def patient_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exporters wait an hour for a collector, so that whatever waits for one never ends."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")


def node_config(**keys: Any) -> NodeConfig:
    files = {f"{kind}_pem": Path(kind) for kind in ("cert", "key", "trust")}
    return NodeConfig.model_validate({**files, "gateway_addresses": ["/ip4/127.0.0.1/tcp/1"], **keys})


@contextmanager
def exporting(**keys: Any) -> Iterator[Export]:
    export = open_export(node_config(**keys), service="hypha-worker", version="9.9", instance="12D3peer")
    try:
        yield export
    finally:
        export.close()


def work() -> None:
    with instrumentation.span("outside", {"hypha.round": 3}, parent=PARENT, ago=0.5):
        with instrumentation.span("inside", kind=instrumentation.SpanKind.CLIENT):
            WORK.add(2, {"kind": "hard"})
            WORK.add(3, {"kind": "hard"})
        SPEED.record(0.25)
        ROOM.set(10, {"job": "a"})
        ROOM.set(20, {"job": "b"})
        ROOM.forget({"job": "a"})


def check_received(collector: Collector) -> None:
    spans = {span.name: span for span in collector.spans}
    outside, inside = spans["outside"], spans["inside"]
    assert outside.trace_id.hex() == inside.trace_id.hex() == PARENT.split("-")[1]
    assert outside.parent_span_id.hex() == PARENT.split("-")[2]
    assert inside.parent_span_id == outside.span_id
    assert outside.end_time_unix_nano - outside.start_time_unix_nano >= 5e8
    [counted] = collector.metrics["test.work"].sum.data_points
    assert (counted.as_double or counted.as_int) == 5
    assert collector.metrics["test.speed"].histogram.data_points[0].sum == 0.25
    [room] = collector.metrics["test.room"].sum.data_points
    assert (room.as_double or room.as_int) == 20
    assert not collector.metrics["test.room"].sum.is_monotonic
    assert collector.headers["authorization"] == "Basic abc=="
    for resource in collector.resources:
        assert resource["service.instance.id"] == "12D3peer"
        assert resource["service.version"] == "9.9"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "table"])
def test_spans_and_metrics_are_exported(as_text: bool, protocol: str) -> None:
    pairs: dict[str, Any] = {
        "telemetry_headers": {"Authorization": "Basic abc=="},
        "telemetry_attributes": {"service.name": "worker-01", "region": "west"},
    }
    if as_text:
        pairs = {key: ",".join(f"{name}={text}" for name, text in table.items()) for key, table in pairs.items()}
    with (grpc_collector if protocol == "grpc" else http_collector)() as collector:
        with exporting(telemetry_endpoint=collector.url, telemetry_protocol=protocol, **pairs):
            work()
        check_received(collector)
        for resource in collector.resources:
            assert (resource["service.name"], resource["region"]) == ("worker-01", "west")


def test_failed_span_has_error_status_and_cancelled_span_has_not() -> None:
    with http_collector() as collector:
        with exporting(telemetry_endpoint=collector.url):
            with pytest.raises(ValueError, match="broken"), instrumentation.span("fails"):
                raise ValueError("broken")
            with pytest.raises(KeyboardInterrupt), instrumentation.span("cancelled"):
                raise KeyboardInterrupt
        spans = {span.name: span for span in collector.spans}
    assert (spans["fails"].status.code, spans["fails"].status.message) == (2, "broken")
    assert spans["cancelled"].status.code == 0
    assert [pair.key for pair in spans["cancelled"].attributes] == ["hypha.cancelled"]


@pytest.mark.parametrize(
    ("sampler", "ratio", "alone", "below"),
    [
        ("always_on", 0.0, True, True),
        ("always_off", 1.0, False, False),
        ("traceidratio", 0.0, False, False),
        ("traceidratio", 1.0, True, True),
        ("parentbased_always_on", 0.0, True, True),
        ("parentbased_always_off", 1.0, False, True),
        ("parentbased_traceidratio", 0.0, False, True),
    ],
)
def test_sampler_decides_what_is_recorded(sampler: str, ratio: float, alone: bool, below: bool) -> None:
    with http_collector() as collector:
        keys = {"telemetry_sampler": sampler, "telemetry_sample_ratio": ratio}
        with exporting(telemetry_endpoint=collector.url, **keys):
            instrumentation.start_span("alone").end()
            with instrumentation.span("below", parent=PARENT):
                assert (instrumentation.current_traceparent() or "").endswith("-01" if below else "-00")
        assert {span.name for span in collector.spans} == set(["alone"] * alone + ["below"] * below)


# --------------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize("receiver", [http_collector, grpc_collector], ids=["http", "grpc"])
def test_log_records_are_exported_within_their_trace(receiver: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = logging.getLogger("hypha_worker.tasks.task_run")
    keys = {"telemetry_protocol": "grpc"} if receiver is grpc_collector else {}
    with receiver() as collector, exporting(telemetry_endpoint=collector.url, **keys):
        log.debug("not wanted at this level")
        log.info("job %s begins", "j-1")
        with instrumentation.span("inside", parent=PARENT):
            log.warning("half a character: \udc80, and %s", "x" * 20_000)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
    begun, warned, failed = collector.logs
    assert begun.body.string_value == "job j-1 begins"
    assert (begun.severity_text, begun.severity_number, begun.trace_id) == ("INFO", 9, b"")
    assert warned.trace_id.hex() == PARENT.split("-")[1]
    assert warned.span_id == next(span.span_id for span in collector.spans if span.name == "inside")
    assert warned.body.string_value.startswith("half a character: ?, and xxx")
    assert len(warned.body.string_value) == 8192
    about = {pair.key: pair.value.string_value for pair in failed.attributes}
    assert (failed.severity_text, about["exception.type"], about["exception.message"]) == (
        "ERROR",
        "ValueError",
        "broken",
    )
    assert "Traceback" in about["exception.stacktrace"]
    log.info("after the end")
    assert len(collector.logs) == 3
    assert not any(type(handler).__name__ == "_LogExport" for handler in logging.getLogger().handlers)


def test_log_records_of_the_exporters_are_not_exported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with http_collector() as collector:
        collector.refuse = "/v1/logs"
        with exporting(telemetry_endpoint=collector.url):
            logging.getLogger("somewhere").info("told")
            wait_until(lambda: "takes no" in caplog.text, 30, "the log saying so")
        collector.refuse = ""
        with exporting(telemetry_endpoint=collector.url):
            logging.getLogger("urllib3.connectionpool").debug("own")
            logging.getLogger("hypha_net.node.telemetry").warning("own")
            logging.getLogger("somewhere").info("again")
    assert {record.body.string_value for record in collector.logs} == {"again"}
    [told] = [record.getMessage() for record in caplog.records if "takes no" in record.getMessage()]
    assert "takes no logs, not told again until it does" in told


def test_log_burst_is_bounded_and_does_not_block(patient_exporters: None) -> None:
    logging.getLogger().setLevel(logging.INFO)
    with hanging_collector() as url, exporting(telemetry_endpoint=url):
        for number in range(3_000):  # more than the queue's capacity
            logging.getLogger("somewhere").info("line %d", number)


# -------------------------------------------------------------------------------------------------- per-signal settings


def test_each_signal_may_have_its_own_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_collector() as shared, http_collector() as traces, grpc_collector() as logs:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", traces.url + "/spans/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Basic%20def==,x-who=me")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", logs.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "grpc")
        with exporting(telemetry_endpoint=shared.url, telemetry_headers={"Authorization": "Basic abc=="}):
            work()
            logging.getLogger("somewhere").warning("told")
    assert (shared.paths, shared.headers["authorization"]) == ({"/otlp/v1/metrics"}, "Basic abc==")
    assert (traces.paths, traces.headers["authorization"]) == ({"/otlp/spans/traces"}, "Basic def==")
    assert traces.headers["x-who"] == "me"
    assert {span.name for span in traces.spans} == {"outside", "inside"}
    assert [record.body.string_value for record in logs.logs] == ["told"]


def test_single_signals_can_be_enabled_or_disabled() -> None:
    bare = node_config()
    assert targets(bare, {}) == {}
    one = targets(bare, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://me:p%40ss@m:1/x"})
    assert [(target.url, target.shown) for target in one.values()] == [("http://m:1/x", "http://***@m:1/x")]
    assert one["metrics"].headers == {"authorization": "Basic bWU6cEBzcw=="}
    shared = node_config(telemetry_endpoint="http://c:4318/otlp/")
    assert {target.url for target in targets(shared, {}).values()} == {
        f"http://c:4318/otlp/v1/{signal}" for signal in ("traces", "metrics", "logs")
    }
    assert set(targets(shared, {"OTEL_LOGS_EXPORTER": "none"})) == {"traces", "metrics"}
    assert targets(shared, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://l"}) == {}


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4318", "write the scheme too"),
        ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "http/json", "write http/protobuf or grpc"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "hunter2", "write name=value"),
    ],
)
def test_invalid_variable_is_refused_by_name(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(NodeConfig, None, {variable: value}, {})
    assert variable in str(refused.value)
    assert remedy in str(refused.value)
    assert "hunter2" not in str(refused.value)


# -------------------------------------------------------------------------------------------------- failing collectors


def node_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hypha_net")]


@pytest.mark.parametrize(
    ("collector", "protocol"),
    [
        (hanging_collector, "http/protobuf"),
        (absent_collector, "grpc"),
        pytest.param(hanging_collector, "grpc", marks=pytest.mark.nightly),
        pytest.param(absent_collector, "http/protobuf", marks=pytest.mark.nightly),
    ],
)
def test_failing_collector_does_not_block_and_is_logged_once(
    collector: Any, protocol: str, patient_exporters: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    # the library logs nothing twice in 20 seconds, and would be silent after the previous test
    for kept in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        vars(kept).clear()
    with collector() as url:
        keys = {"telemetry_endpoint": url.replace("//", "//me:hunter2@"), "telemetry_protocol": protocol}
        with exporting(**keys):
            for _ in range(2500):  # more than the capacity of the span queue
                instrumentation.start_span("work").end()
                logging.getLogger("somewhere").info("at work")
            WORK.add(1)
            if collector is absent_collector:  # it refuses at once, which is logged
                wait_until(lambda: any("takes no" in line for line in node_warnings(caplog)), 30, "the log saying so")
    # a thread of an earlier test's exporter, blocked by its own collector, may still log
    told = node_warnings(caplog)
    assert len(told) <= 1, told
    if collector is absent_collector:
        assert re.search("takes no (traces|metrics|logs), not told again until it does", told[0])
        assert url.replace("//", "//***@") in told[0]
        assert "hunter2" not in caplog.text


DAEMON = """
import sys
import anyio
from hypha_net import instrumentation
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.lifecycle import run_daemon
from hypha_net.testing import MemoryNetwork

async def serve(config, node):
    with instrumentation.span("life"):
        print(not {"opentelemetry.sdk", "opentelemetry.exporter", "grpc"}.isdisjoint(sys.modules), flush=True)
        await anyio.sleep(60)

keys = {"telemetry_endpoint": sys.argv[1]} if len(sys.argv) > 1 else {}
config = NodeConfig(cert_pem="c", key_pem="k", trust_pem="t", gateway_addresses=["/ip4/127.0.0.1/tcp/1"], **keys)
connect = lambda config, role: MemoryNetwork().endpoint("node")
sys.exit(run_daemon(config, serve, role="data", version="1", connect=connect))
"""


def run_and_end(folder: Path, *args: str) -> tuple[str, int]:
    """Return whether a daemon imported the SDK, and its exit status after SIGTERM."""
    script = folder / "daemon.py"
    script.write_text(DAEMON)
    command = [sys.executable, str(script), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            imported = first_line(process)
            process.send_signal(signal.SIGTERM)
            return imported, process.wait(60)
        finally:
            process.kill()


def test_daemon_without_a_collector_does_not_import_the_sdk(tmp_path: Path) -> None:
    assert run_and_end(tmp_path) == ("False", 0)


def test_daemon_exports_until_its_end(tmp_path: Path) -> None:
    with http_collector() as collector:
        assert run_and_end(tmp_path, collector.url) == ("True", 0)
        assert [span.name for span in collector.spans] == ["life"]
        assert "hypha.peers.connected" in collector.metrics
        assert {resource["service.name"] for resource in collector.resources} == {"hypha-data"}


def test_daemon_does_not_wait_for_a_collector_that_hangs(tmp_path: Path, patient_exporters: None) -> None:
    with hanging_collector() as url:
        assert run_and_end(tmp_path, url) == ("True", 0)


# ----------------------------------------------------------------------------------------------------- between peers


def ask_once() -> tuple[str | None, str | None]:
    """Return the traceparent in one request, and the one of its handler."""
    seen: list[str | None] = []

    async def renew(_peer: PeerId, message: RenewLease) -> LeaseRenewal:
        seen.extend((message.traceparent, instrumentation.current_traceparent()))
        return RenewalFailed()

    async def main() -> None:
        network = MemoryNetwork()
        async with network.endpoint("a") as a, network.endpoint("b") as b:
            rpc.serve(b, RENEW_LEASE, renew)
            await rpc.call(a, b.peer_id, RENEW_LEASE, RenewLease(id=uuid.uuid4()))

    run(main)
    return seen[0], seen[1]


def test_request_carries_the_trace_to_its_handler() -> None:
    with http_collector() as collector:
        with exporting(telemetry_endpoint=collector.url), instrumentation.span("job"):
            carried, handled = ask_once()
        spans = {(span.name, span.kind): span for span in collector.spans}
    client, server = spans["RenewLease", 3], spans["RenewLease", 2]
    assert len({span.trace_id for span in collector.spans}) == 1
    assert client.parent_span_id == spans["job", 1].span_id
    assert server.parent_span_id == client.span_id
    assert carried is not None
    assert handled is not None
    assert (carried.split("-")[2], handled.split("-")[2]) == (client.span_id.hex(), server.span_id.hex())


def test_trace_is_forwarded_but_not_started_without_a_collector() -> None:
    assert ask_once() == (None, None)
    with instrumentation.attached(PARENT), instrumentation.span("not recorded"):
        assert ask_once() == (PARENT, PARENT)
    assert instrumentation.current_traceparent() is None


@pytest.mark.parametrize(
    "hostile", ["", "x" * 4000, PARENT.upper() + "\n", PARENT + "-01", PARENT.replace("00-0", "ff-0")]
)
def test_malformed_traceparent_is_ignored(hostile: str) -> None:
    with instrumentation.attached(hostile), instrumentation.span("work", parent=hostile):
        assert instrumentation.current_traceparent() is None
    assert instrumentation.trace_of(RenewLease(id=uuid.uuid4(), traceparent=hostile)) is None
