"""Job bridge requests of the user's documents, sent over a real socket, and the shapes of the answers.

The bridge is backed by an in-memory network and a local hub. `#` comments in bodies are removed, since JSON has none,
and the peers' shortened ids are replaced by those of the job.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.doc_snippets import block
from support.fake_http_server import files, served
from support.task_settings import all_of, training
from support.training_bridge import ATTEMPT, make_bridge, make_context, open_client

from hypha.accelerate_executor.training import read_settings
from hypha_net import transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.job_spec import HuggingFaceReference, Model, SchedulerReference
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_worker.executors.process.process_execution import task_json

LIMIT = 1 << 20
HUB = {"model.safetensors": b"weights", "config.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve the repository of the block; yields the requested paths."""
    asked: list[str] = []

    def find(path: str) -> tuple[bytes | None, dict[str, str]]:
        asked.append(path)
        content = HUB.get(path.removeprefix("/microsoft/resnet-50/resolve/main/"))
        return content, {"etag": f'"{hashlib.sha256(content or b"").hexdigest()}"', "x-repo-commit": "0" * 40}

    with served(files(find)) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield asked


@dataclass
class Bridge:
    """A job's bridge and the peers of the job."""

    client: httpx.AsyncClient
    work_dir: Path
    worker: MemoryEndpoint
    peers: tuple[MemoryEndpoint, MemoryEndpoint]

    async def push(self, peer: MemoryEndpoint, number: int, name: str, content: bytes) -> None:
        """Push an outer update, as a parameter server does after an outer step."""
        size, digest = await transfer.describe(content)
        header = PushHeader(ATTEMPT, number, OUTER_UPDATE, name, size, digest, self.peers[0].peer_id)
        await transfer.push(peer, self.worker.peer_id, content, header)

    def request(self, name: str) -> httpx.Request:
        """Return the documented request with real ids and without comments."""
        head, _, body = block(name).text.partition("\n\n")
        first, *headers = head.splitlines()
        method, path = first.split(" ")
        body = re.sub(r"\s# .*$", "", body, flags=re.MULTILINE)
        for short, peer in zip(("12D3KooWA...", "QmX7d..."), self.peers, strict=True):
            body = body.replace(short, str(peer.peer_id))
        named = dict(line.split(": ", 1) for line in headers)
        return self.client.build_request(method, path, content=body, headers=named)


@asynccontextmanager
async def opened(folder: Path, socket: Path) -> AsyncIterator[Bridge]:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        worker, one, two = [await stack.enter_async_context(network.endpoint(name)) for name in ("worker", "1", "2")]
        model = HuggingFaceReference(repository="owner/repo", filenames=("config.json",))
        config = training(
            one.peer_id,
            model=Model(task="auto", artifact=model, input_names=("x",)),
            data=SchedulerReference(peer=one.peer_id, dataset="imagenet"),
            updates=all_of(one.peer_id, two.peer_id),
            results=all_of(one.peer_id, two.peer_id),
        )
        context = make_context(folder, worker, one.peer_id, config)
        bridge, backend = make_bridge(context)
        client = await stack.enter_async_context(open_client(backend, socket))
        try:
            yield Bridge(client, context.work_dir, worker, (one, two))
        finally:
            bridge.close()


AtBridge = Callable[[], AbstractAsyncContextManager[Bridge]]


@pytest.fixture
def at_bridge(tmp_path: Path) -> Iterator[AtBridge]:
    with tempfile.TemporaryDirectory(prefix="hd-", dir="/tmp") as short:
        yield lambda: opened(tmp_path, Path(short) / "b.sock")


def check_shape(shown: Any, given: Any) -> None:
    """Check that every documented key is present with a value of the same type; text keeps its format."""
    assert type(given) is type(shown)
    if isinstance(shown, dict):
        assert set(shown) <= set(given)
        for key in shown:
            check_shape(shown[key], given[key])
    elif isinstance(shown, list):
        for each in given:
            check_shape(shown[0], each)


async def test_a_fetch_is_answered_as_documented(at_bridge: AtBridge, hub: list[str]) -> None:
    async with at_bridge() as bridge:
        answer = await bridge.client.send(bridge.request("worker-older:425"))
        assert answer.status_code == 200, answer.text
        [shown] = json.loads(block("worker-older:441").text)
        files = answer.json()
        check_shape([shown], files)
        assert [file["path"] for file in files] == ["models/model.safetensors", "models/config.json"]
        for file, content in zip(files, HUB.values(), strict=True):
            assert (bridge.work_dir / file["path"]).read_bytes() == content
            assert (file["size"], file["checksum"]) == (len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
            assert file["metadata"]["source"] == shown["metadata"]["source"] == "huggingface"
            form = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
            assert form.fullmatch(file["metadata"]["timestamp"])
            assert form.fullmatch(shown["metadata"]["timestamp"])
        assert any(path.startswith("/microsoft/resnet-50/resolve/main/") for path in hub)


@pytest.mark.parametrize(("strategy", "count"), [("All", 2), ("One", 1), ("Random", 1)])
async def test_a_file_is_sent_as_documented(at_bridge: AtBridge, tmp_path: Path, strategy: str, count: int) -> None:
    async with at_bridge() as bridge:
        (bridge.work_dir / "output").mkdir()
        (bridge.work_dir / "output" / "gradients.safetensors").write_bytes(b"gradients")
        arrived: list[bytes] = []

        async def accept(_peer: Any, header: PushHeader) -> transfer.FilePushTarget | Refusal:
            if header.kind != PSEUDO_GRADIENT:  # as a parameter server does
                return Refusal(reason=f"{header.kind} is not accepted")
            path = tmp_path / f"{uuid.uuid4()}"

            async def done(_size: int, _digest: str) -> None:
                arrived.append(path.read_bytes())

            return transfer.FilePushTarget(path, LIMIT, done)

        for peer in bridge.peers:
            transfer.serve_pushes(peer, accept)
        request = bridge.request("worker-older:462")
        content = request.content.replace(b'"All"', json.dumps(strategy).encode())
        answer = await bridge.client.post(request.url, content=content)
        assert answer.status_code == 200, answer.text
        assert arrived == [b"gradients"] * count
        assert len(answer.json()["sent"]) == count


async def test_received_files_are_told_as_documented(at_bridge: AtBridge) -> None:
    """The request names no peers, which means any peer of the job."""
    async with at_bridge() as bridge:
        with_comment = block("worker-older:486").text.partition("\n\n")[2]
        refused = await bridge.client.post("/resources/receive", content=with_comment)
        assert (refused.status_code, refused.json()["error"]) == (400, "bad-request")
        assert "line 4" in refused.json()["detail"]
        shown = [json.loads(line.removeprefix("data: ")) for line in block("worker-older:501").text.splitlines()]
        names = [event["path"].removeprefix("incoming/") for event in shown]
        for number, (peer, name) in enumerate(zip(bridge.peers, names, strict=True), 1):
            await bridge.push(peer, number, name, b"chunk")
        answer = await bridge.client.send(bridge.request("worker-older:486"), stream=True)
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        events = []
        async for line in answer.aiter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 2:
                break
        await answer.aclose()
        check_shape(shown, events)
        assert [event["from_peer"] for event in events] == [str(peer.peer_id) for peer in bridge.peers]
        for event, documented in zip(events, shown, strict=True):
            assert (event["path"], event["sequence"]) == (documented["path"], documented["sequence"])
            assert (bridge.work_dir / event["path"]).read_bytes() == b"chunk"


async def test_the_documented_tasks_are_what_a_process_gets(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "executor.md").read_text()
    section = page.split("\n## The task as JSON\n")[1].split("\n## ")[0]
    shown = [json.loads(text) for text in re.findall(r"^```json\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)]
    config = read_settings(json.dumps(shown[1]))
    given: list[dict[str, Any]] = []
    network = MemoryNetwork()
    async with network.endpoint("worker") as worker, network.endpoint("scheduler") as scheduler:
        given.append(task_json(make_context(tmp_path, worker, scheduler.peer_id, config)))
    assert [list(task) for task in shown] == [list(given[0])] * 2
    assert given[0]["settings"] == shown[1]["settings"]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(given[0])
