"""Downloads from a server that stalls, over real sockets: other jobs go on and end, and what is cancelled stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.fake_http_server import served

from hypha_proto.job_spec import All, PeersReference

InLab = Callable[..., Any]

COUNT = 44
"""Downloads of one job; anyio runs 40 threads at once by default."""
STALLS = f"""
import threading
def stall(number):
    post("/resources/fetch", {{"resource": config["model"]["artifact"], "path": f"in-{{number}}"}})
for number in range({COUNT}):
    threading.Thread(target=stall, args=(number,), daemon=True).start()
time.sleep(60)
"""
GIVES_UP = """
import os
import threading
def give_up(number):
    bridge = Bridge("bridge")
    body = json.dumps({"resource": config["model"]["artifact"], "path": f"in-{number}"})
    bridge.connect()
    bridge.request("POST", "/resources/fetch", body, {"content-type": "application/json"})
    while not os.path.exists("give-up"):
        time.sleep(0.01)
    bridge.close()
threads = [threading.Thread(target=give_up, args=(number,)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
post("/status/send", {"status": {"batch_size": 1}})
other = dict(config["model"]["artifact"], filenames=["other.json"])
status, files = post("/resources/fetch", {"resource": other, "path": "other"})
assert status == 200
"""


@dataclass
class StallingHub:
    """A Hub whose ``config.json`` begins and never ends."""

    stalled: int = 0
    """Downloads that wait now."""
    most: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, by: int) -> None:
        with self._lock:
            self.stalled += by
            self.most = max(self.most, self.stalled)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StallingHub]:
    hub = StallingHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.begin(5000)

        def do_GET(self) -> None:
            if not self.path.endswith("/config.json"):
                self.begin(2)
                self.wfile.write(b"{}")
                return
            self.begin(5000)
            self.wfile.write(b"x")
            self.wfile.flush()
            hub.change(1)
            self.connection.settimeout(60)
            with suppress(ConnectionResetError):  # a client that closes with "x" unread resets the connection
                self.connection.recv(1)  # until the client closes
            hub.change(-1)
            self.close_connection = True

        def begin(self, size: int) -> None:
            self.send_response(200)
            for name, value in (("etag", '"e"'), ("x-repo-commit", "0" * 40), ("content-length", str(size))):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with served(Handler) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


async def test_stalled_downloads_of_one_job_hold_up_no_other(in_lab: InLab, hub: StallingHub) -> None:
    async with in_lab() as lab:
        first = await lab.start(STALLS)
        await lab.scheduler.until(lambda: hub.stalled >= 8)
        others = PeersReference(peers=(lab.data.peer_id,), strategy=All())
        second = await lab.start("pass", lab.train_spec(results=others))
        end = await lab.scheduler.ended()
        assert (end.lease, end.outcome) == (second, "finished")
        assert hub.stalled == 8, "they still wait"
        await lab.scheduler.release(lab.peer, first)
        assert (await lab.scheduler.ended()).lease == first
        await lab.scheduler.until(lambda: hub.stalled == 0)
        assert lab.left_behind() == []
        assert hub.most == 8


def give_up(work_dir: Path) -> None:
    """Tell the only job to give its downloads up."""
    [specification] = work_dir.rglob("job.json")
    specification.with_name("give-up").touch()


async def test_a_download_whose_executor_gave_up_gives_its_place_back(
    in_lab: InLab, hub: StallingHub, tmp_path: Path
) -> None:
    async with in_lab() as lab:
        await lab.start(GIVES_UP)
        await lab.scheduler.until(lambda: hub.stalled >= 8)
        give_up(tmp_path)
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        await lab.scheduler.until(lambda: hub.stalled == 0)
        assert (await lab.scheduler.ended()).outcome == "finished"
        assert hub.most == 8
