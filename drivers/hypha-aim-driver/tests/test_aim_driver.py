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
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_aim_driver.app import MAX_BODY, AimMetrics, create_app

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
GOOD = {"worker_id": PEER, "round": 3, "metric_name": "loss", "value": 0.5}


class RecordingSink:
    def __init__(self) -> None:
        self.metrics: list[AimMetrics] = []

    def record(self, metric: AimMetrics) -> None:
        self.metrics.append(metric)


CLIENT = TestClient(create_app(RecordingSink()))


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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 50_000,
        b'{"a":' * 10_000,
        json.dumps(GOOD).encode()[:-1] + b',"more":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"round":1,"round":2}',
        b'{"round":' + b"9" * 10_000 + b"}",
    ],
)
def test_a_body_that_is_not_a_metric_gets_422_without_being_repeated(body: bytes) -> None:
    answer = TestClient(create_app(RecordingSink())).post("/status", content=body)
    assert answer.status_code == 422
    assert len(answer.content) < 2000


def test_a_long_body_gets_413() -> None:
    body = json.dumps(GOOD | {"more": "x" * MAX_BODY}).encode()
    assert TestClient(create_app(RecordingSink())).post("/status", content=body).status_code == 413


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.binary()
    | st.dictionaries(st.sampled_from([*GOOD, "job_id"]), _JSON).map(lambda change: json.dumps(GOOD | change).encode())
)
@settings(deadline=None)
def test_any_body_is_a_metric_or_refused(body: bytes) -> None:
    assert CLIENT.post("/status", content=body).status_code in (200, 422)


def _post(port: int, body: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/status", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


def test_program_serves_and_exits_on_sigterm() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from hypha_aim_driver.cli import main; main()", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while True:
                try:
                    assert _post(port, GOOD) == 200
                    break
                except urllib.error.URLError:
                    assert process.poll() is None
                    time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=20)
    assert "loss = 0.5" in log
