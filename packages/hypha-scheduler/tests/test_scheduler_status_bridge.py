"""Event file and status bridge: events are complete lines, metrics are posted with retries."""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.fake_http_server import answers, served
from support.waiting import until

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
