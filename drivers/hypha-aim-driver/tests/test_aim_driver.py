"""HTTP application: valid metrics are recorded, malformed ones get 422, and the program exits on SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hypha_aim_driver.app import AimMetrics, create_app

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
GOOD = {"worker_id": PEER, "round": 3, "metric_name": "loss", "value": 0.5}


class RecordingSink:
    def __init__(self) -> None:
        self.metrics: list[AimMetrics] = []

    def record(self, metric: AimMetrics) -> None:
        self.metrics.append(metric)


@pytest.mark.parametrize("body", [GOOD, GOOD | {"value": 1}, GOOD | {"job_id": "a"}, GOOD | {"later": 1}])
def test_valid_metric_is_recorded(body: dict[str, Any]) -> None:
    sink = RecordingSink()
    assert TestClient(create_app(sink)).post("/status", json=body).status_code == 200
    expected = AimMetrics(worker_id=PEER, round=3, metric_name="loss", value=body["value"], job_id=body.get("job_id"))
    assert sink.metrics == [expected]


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": "someone"},
        {"round": -1},
        {"round": 2**32},
        {"round": "3"},
        {"metric_name": ""},
        {"metric_name": "lo\0ss"},
        {"value": None},
        {"job_id": ""},
    ],
)
def test_malformed_metric_gets_422(change: dict[str, Any]) -> None:
    sink = RecordingSink()
    answer = TestClient(create_app(sink)).post("/status", json=GOOD | change)
    assert answer.status_code == 422
    assert next(iter(change)) in answer.text
    assert sink.metrics == []


def _post(port: int, body: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/status", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        return int(answer.status)


def test_program_serves_and_exits_on_sigterm() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from hypha_aim_driver.cli import main; main()", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    assert _post(port, GOOD) == 200
                    break
                except urllib.error.URLError:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=20)
    assert "loss = 0.5" in log
