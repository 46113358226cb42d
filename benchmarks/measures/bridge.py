"""Uploads to a job's bridge, against the same application in plain uvicorn; both on a Unix socket.

Each request is a report of spans close to the largest body that a bridge takes, 1 MiB, on one connection. Both servers
read and validate it; the bridge then hands it to the worker's event loop, and limits the connections of the job.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Final, cast

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_proto.bridge_api import MAX_SPANS, SPANS, SpanReport, read_spans
from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.unix_socket import SocketPlace

REQUESTS: Final = 60
TIMEOUT: Final = 60.0
_TEXT: Final = "x" * 290
_SPAN: Final = {"name": "s", "ago_ms": 2.0, "duration_ms": 1.0, "attributes": {f"a{n}": _TEXT for n in range(13)}}
BODY: Final = json.dumps({"spans": [_SPAN] * MAX_SPANS}).encode()


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both in turns."""
    with tempfile.TemporaryDirectory(prefix="hypha-") as folder:  # paths of sockets are to be short
        sockets = Path(folder, "bridge.sock"), Path(folder, "uvicorn.sock")
        pairs = [(_to_bridge(sockets[0]), _to_uvicorn(sockets[1])) for _ in range(run.repeat)]
    ours, plain = map(statistics.median, zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    what = f"uploads of {len(BODY) >> 10} KiB to a job's bridge"
    return [Row(what, "MiB/s", ours, plain, "plain uvicorn on a Unix socket", ratio, ">= 0.8")]


class _Backend:
    """Takes spans."""

    async def record_spans(self, report: SpanReport) -> int:
        return len(report.spans)


def _to_bridge(path: Path) -> float:
    async def serve() -> float:
        async with open_bridge(cast(BridgeBackend, _Backend()), SocketPlace(path), lambda _pid: True):
            return await anyio.to_thread.run_sync(_upload, path)

    return anyio.run(serve, backend="trio")


def _to_uvicorn(path: Path) -> float:
    with _plain_server(path):
        return _upload(path)


@contextmanager
def _plain_server(path: Path) -> Iterator[None]:
    app = FastAPI()

    @app.post(SPANS)
    async def record(request: Request) -> dict[str, Any]:
        return {"recorded": len(read_spans(await request.body()).spans)}

    server = uvicorn.Server(uvicorn.Config(app, uds=str(path), log_level="error"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + TIMEOUT
        while not server.started:
            if time.monotonic() >= deadline:
                raise TimeoutError("uvicorn has not started")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("bridge", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(str(self._path))


def _upload(path: Path) -> float:
    """Return MiB/s of all requests but the first, which starts the server's thread."""
    connection = _UnixConnection(path)
    began = 0.0
    for number in range(REQUESTS + 1):
        began = time.perf_counter() if number == 1 else began
        connection.request("POST", SPANS, BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200 or json.loads(answer.read())["recorded"] != MAX_SPANS:
            raise RuntimeError(f"an upload was answered with {answer.status}")
    seconds = time.perf_counter() - began
    connection.close()
    return REQUESTS * len(BODY) / seconds / (1 << 20)
