"""Event file and status bridge: events are complete lines, metrics are posted with retries."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.waiting import run

from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.metrics import status_bridge
from hypha_scheduler.metrics.status_bridge import StatusBridge


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
        events.write("task_ended", reason=f"{'x' * 280} https://user:5ec2e7@host/a?X-Amz-Signature=5ec2e7: no")
    for text in ((tmp_path / "metrics.jsonl").read_text(), caplog.text):
        assert "https://***@host" in text
        assert "5ec2e7" not in text


class _Bridge(BaseHTTPRequestHandler):
    """Responds with 503 to the first `refusals` posts, and with 422 to a metric named bad."""

    got: list[tuple[str, Any]]
    refusals = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 200
        if _Bridge.refusals:
            _Bridge.refusals -= 1
            status = 503
        elif body["metric_name"] == "bad":
            status = 422
        else:
            self.got.append((self.path, body))
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(refusals: int = 0) -> Iterator[str]:
    _Bridge.got, _Bridge.refusals = [], refusals
    server = HTTPServer(("127.0.0.1", 0), _Bridge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def posting(bridge: StatusBridge) -> Iterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    def run_case(case: Callable[[], Awaitable[None]]) -> None:
        async def with_bridge() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bridge.run)
                await case()
                tasks.cancel_scope.cancel()

        run(with_bridge, 60)

    yield run_case


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name.startswith("hypha_scheduler")]
    return [record.getMessage() for record in own if record.levelname == "WARNING"]


def test_metrics_are_posted_to_the_bridge() -> None:
    with serving() as address, posting(bridge := StatusBridge(address)) as run_case:

        async def case() -> None:
            bridge.put("w", 2, "loss", 0.5)
            bridge.put("w", 2, "infinite", float("nan"))
            bridge.put("w", 3, "loss", 0.25, job_id="j")
            await bridge.drain(math.inf)

        run_case(case)
    metric = {"worker_id": "w", "round": 2, "metric_name": "loss", "value": 0.5}
    assert _Bridge.got == [("/status", metric), ("/status", metric | {"round": 3, "value": 0.25, "job_id": "j"})]


def test_failed_posts_are_retried_but_rejected_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(refusals=2) as address, posting(bridge := StatusBridge(address)) as run_case:

        async def case() -> None:
            for name in ("loss", "bad", "samples"):
                bridge.put("w", 1, name, 1.0)
            while len(_Bridge.got) < 2:
                await anyio.sleep(0.01)

        run_case(case)
    assert [body["metric_name"] for _, body in _Bridge.got] == ["loss", "samples"]
    assert ["HTTP 503" in warnings(caplog)[0], "HTTP 422" in warnings(caplog)[1]] == [True, True]


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_dead_bridge_does_not_block_and_is_logged_once(
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
        bridge = StatusBridge(f"127.0.0.1:{listener.getsockname()[1]}", post_timeout=0.1)

        async def case() -> None:
            for number in range(5000):
                bridge.put("w", number, "loss", 1.0)
            assert failures == []  # none of them waited for its post
            while len(failures) < 4:
                await anyio.sleep(0.01)
            await bridge.drain(math.inf)  # returns although the queue is full
            assert None not in failures

        with posting(bridge) as run_case:
            run_case(case)
    assert len(warnings(caplog)) == 1
