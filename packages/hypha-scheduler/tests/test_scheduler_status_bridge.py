"""Event file, status bridge, TensorBoard: events are complete lines, metrics are posted with retries and exported."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_http_server import answers, served
from support.waiting import until
from tensorboardX.proto.event_pb2 import Event

from hypha_proto.ids import PeerId
from hypha_scheduler.cli import main
from hypha_scheduler.jobs.events import EventFile, JobEvents
from hypha_scheduler.metrics import status_bridge
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.metrics.tensorboard import MetricsFileError, export_metrics
from hypha_scheduler.strategies.base import PostMetric
from hypha_scheduler.strategies.diloco.events import measured_effects, round_closed_effects
from hypha_scheduler.strategies.diloco.round_effects import Measured, RoundClosed


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_bridge, "_RETRY_FIRST", 0.01)
    monkeypatch.setattr(status_bridge, "_RETRY_LONGEST", 0.02)


def test_events_are_complete_json_lines(tmp_path: Path) -> None:
    with EventFile(tmp_path / "metrics.jsonl") as events:
        events.write("round", round=1, loss=float("nan"), counts={"a": 1})
        [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {"event": "round", "time": 0, "round": 1, "loss": None, "counts": {"a": 1}}


def test_events_show_no_secret_parts_of_urls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with EventFile(tmp_path / "metrics.jsonl") as events:
        events.write("task_ended", reason=f"{'x' * 99_999} https://user:5ec2e7@host/a?X-Amz-Signature=5ec2e7: no")
    assert (tmp_path / "metrics.jsonl").stat().st_size < 70_000
    for text in ((tmp_path / "metrics.jsonl").read_text(), caplog.text):
        assert "https://***@host" in text
        assert "5ec2e7" not in text


@dataclass
class Bridge:
    """Responds with 503 to the first `refusals` posts, and with 422 to a metric named bad."""

    refusals: int = 0
    got: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if self.refusals:
            self.refusals -= 1
            return 503, {}, b""
        if body["metric_name"] == "bad":
            return 422, {}, b""
        self.got.append((request.path, body))
        return 200, {}, b""


@asynccontextmanager
async def posting(server: Bridge) -> AsyncIterator[StatusBridge]:
    with served(answers(server.answer)) as url:
        async with running(StatusBridge(url.removeprefix("http://"))) as bridge:
            yield bridge


@asynccontextmanager
async def running(bridge: StatusBridge) -> AsyncIterator[StatusBridge]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bridge.run)
        yield bridge
        tasks.cancel_scope.cancel()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name.startswith("hypha_scheduler")]
    return [record.getMessage() for record in own if record.levelname == "WARNING"]


async def test_metrics_are_posted_to_the_bridge() -> None:
    async with posting(server := Bridge()) as bridge:
        bridge.put("w", 2, "loss", 0.5)
        bridge.put("w", 2, "infinite", float("nan"))
        bridge.put("w", 3, "loss", 0.25, job_id="j")
        await bridge.drain(math.inf)
    metric = {"worker_id": "w", "round": 2, "metric_name": "loss", "value": 0.5}
    assert server.got == [("/status", metric), ("/status", metric | {"round": 3, "value": 0.25, "job_id": "j"})]


async def test_failed_posts_are_retried_but_rejected_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    async with posting(server := Bridge(refusals=2)) as bridge:
        for name in ("loss", "bad", "samples"):
            bridge.put("w", 1, name, 1.0)
        await until(lambda: len(server.got) == 2)
    assert [body["metric_name"] for _, body in server.got] == ["loss", "samples"]
    assert ["HTTP 503" in warnings(caplog)[0], "HTTP 422" in warnings(caplog)[1]] == [True, True]


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
async def test_dead_bridge_does_not_block_and_is_logged_once(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Any] = []
    post = StatusBridge._post

    async def counted(*arguments: Any) -> Any:
        failures.append(await post(*arguments))
        return failures[-1]

    monkeypatch.setattr(StatusBridge, "_post", counted)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listener.listen(16)  # connections are accepted but never read
        async with running(StatusBridge(f"127.0.0.1:{listener.getsockname()[1]}", post_timeout=0.1)) as bridge:
            for number in range(5000):
                bridge.put("w", number, "loss", 1.0)
            assert failures == []  # none of them waited for its post
            await until(lambda: len(failures) >= 4)
            await bridge.drain(math.inf)  # returns although the queue is full
            assert None not in failures
    assert len(warnings(caplog)) == 1


PEER = PeerId.from_public_key(bytes(32))


class _KeptPosts(StatusBridge):
    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.posts: list[tuple[str, int, str, float, str | None]] = []

    def put(self, worker: str, step: int, name: str, value: float, *, job_id: str | None = None) -> None:
        self.posts.append((worker, step, name, value, job_id))


def test_round_metrics_are_posted_per_worker(tmp_path: Path) -> None:
    other, job_id = PeerId.from_public_key(bytes([1] * 32)), uuid.uuid4()
    bridge = _KeptPosts()
    measured = Measured(PEER, 3, {"loss": 0.5, "samples_per_second": 80.0, "samples": 1.0})
    closed = RoundClosed(3, {PEER: 96, other: 40}, {PEER: 6, other: 5}, {PEER: 0.0, other: 1.0}, 4.0, 0.5)
    with JobEvents(job_id, tmp_path, bridge) as events:
        events.accepted({})
        for effect in (*measured_effects(measured), *round_closed_effects(closed, 1)):
            if isinstance(effect, PostMetric):
                events.post(effect)
    posted = {
        (worker, name): value for worker, number, name, value, job in bridge.posts if (number, job) == (3, str(job_id))
    }
    assert posted == {
        (str(PEER), "loss"): 0.5,
        (str(PEER), "samples_per_second"): 80.0,
        (str(PEER), "samples"): 96,
        (str(PEER), "batch_size"): 16.0,
        (str(PEER), "utilisation"): 1.0,
        (str(other), "samples"): 40,
        (str(other), "batch_size"): 8.0,
        (str(other), "utilisation"): 0.75,
    }
    assert len(bridge.posts) == len(posted)


def test_events_name_a_worker_as_its_certificate_does_also_when_it_has_gone(tmp_path: Path) -> None:
    connected = {PEER: "gpu-\x1b[3"}
    with JobEvents(uuid.uuid4(), tmp_path, certificate_names=lambda: connected) as events:
        events.emit("worker_joined", worker=str(PEER), reason="it has started")
        connected.clear()
        events.emit("worker_lost", worker=str(PEER), reason="its lease ended")
        events.emit("lease_draining", peer=str(PEER), reason="its owner drains it")
        events.emit("metric", worker=str(PEER), name="loss", value=1.0)
        events.emit("worker_joined", worker="12D3KooWOther", reason="it has started")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("worker_name") for line in lines] == ["gpu-?[3", "gpu-?[3", "gpu-?[3", None, None]


WORKER, OTHER = (str(PeerId.from_public_key(bytes([number] * 32))) for number in range(2))

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(["round", "metric", "accepted"]) | _PLAIN},
    optional={
        "round": st.integers(0, 9) | _PLAIN, "time": st.floats(0, 9) | _PLAIN, "worker": st.just(WORKER) | _PLAIN,
        "name": st.just("loss") | _PLAIN, "value": _PLAIN, "loss": _PLAIN,
        "waits": st.dictionaries(st.text(max_size=5), _PLAIN, max_size=3) | _PLAIN,
    },
)  # fmt: skip


@given(st.lists(st.binary(max_size=50) | _EVENTS.map(lambda event: json.dumps(event).encode()), min_size=1, max_size=4))
@settings(deadline=None)
def test_any_metrics_file_is_exported_or_refused(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with contextlib.suppress(MetricsFileError):
        assert export_metrics(folder, folder / "out") > 0


def write_run(folder: Path) -> None:
    with EventFile(folder / "metrics.jsonl") as events:
        events.write("accepted", job_id="j", directory="d")
        for number in (1, 2):
            for peer in (WORKER, OTHER):
                events.write("metric", worker=peer, round=number, name="loss", value=1 / number)
            waits = {WORKER: 0.0, OTHER: 0.5}
            events.write("round", round=number, samples=96, loss=1 / number, seconds=2.0, waits=waits, counts={})
        events.write("metric", worker=WORKER, round=3, name="loss", value=float("nan"))


def export(run: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["export-metrics", str(run), "--tensorboard", str(out)])


def curves(out: Path) -> dict[str, list[tuple[str, int, float]]]:
    """Return the values in the event files by directory: tag, step and value."""
    found = {}
    for path in out.rglob("events.out.tfevents.hypha"):
        events = [Event.FromString(record) for record in records(path.read_bytes())]
        assert events[0].file_version == "brain.Event:2"
        values = [(value.tag, event.step, value.simple_value) for event in events for value in event.summary.value]
        found[path.parent.relative_to(out).as_posix()] = values
    return found


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length, checksum, data, checksum."""
    while data:
        [length] = struct.unpack_from("<Q", data)
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_export_writes_one_curve_per_worker_also_of_a_running_job(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    write_run(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "metric", "wor')
    result = export(run, out)
    assert result.exit_code == 0
    assert result.output.startswith("14 values in ")
    first = curves(out)
    assert set(first) == {"job", f"worker-{WORKER}", f"worker-{OTHER}"}
    of_round = {("loss", 2, 0.5), ("samples", 2, 96.0), ("seconds", 2, 2.0), (f"wait/{OTHER}", 2, 0.5)}
    assert of_round <= set(first["job"])
    assert first[f"worker-{WORKER}"] == [("loss", 1, 1.0), ("loss", 2, 0.5)]
    assert export(run, out).exit_code == 0
    assert curves(out) == first


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (None, "does not exist"),
        ({"event": "accepted", "time": 1}, "no round is over yet"),
        ({"event": "round", "time": 1, "loss": 1}, "line 1"),
        ({"event": "metric", "time": 1, "round": 1, "worker": "../..", "name": "loss", "value": 1}, "line 1"),
        ([], "line 1"),
        (json.loads("[" * 900 + "]" * 900), "nested more than 64 levels"),
        ({"event": "round", "time": 1, "round": 1, "waits": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": "1", "loss": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": 1 << 63, "loss": 1}, "line 1"),
        ({"event": "round", "time": 1, "round": 1, "loss": 10**400}, "line 1"),
        ({"event": "metric", "time": 1, "round": 1, "worker": WORKER, "name": "\ud800", "value": 1}, "line 1"),
    ],
)
def test_export_errors_are_reported(tmp_path: Path, line: Any, why: str) -> None:
    if line is not None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    result = export(tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert why in result.output
    assert not (tmp_path / "out").exists()
