"""The bridge over a real Unix socket: its answers, its refusals, and how it closes."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import json
import logging
import os
import re
import socket
import stat
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx
import pytest
import uvicorn
from blake3 import blake3
from support.task_settings import training
from support.training_bridge import ATTEMPT, fail_for_disk, make_bridge, make_context, open_client

from hypha_net import rpc, transfer
from hypha_net.errors import first_leaf_error
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.codec import to_plain
from hypha_proto.datasets import DATA, AssignedSlice, DataRequest, SliceAssigned, SlicesAssigned
from hypha_proto.job_spec import (
    Model,
    One,
    PeersReference,
    Reference,
    SchedulerReference,
    SliceAddress,
    TrainConfig,
    UriReference,
)
from hypha_proto.transfer import OTHER_FILE, OUTER_UPDATE, PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_worker.bridge.http_server import MAX_CONNECTIONS
from hypha_worker.bridge.receive_queue import QUEUE_LIMIT, ReceiveQueue
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.unix_socket import BridgeStartError, SocketPlace, bind_socket, choose_place
from hypha_worker.connectors.access_policy import AccessPolicy

LIMIT = 1 << 20


@dataclass
class BridgeUnderTest:
    """A bridge with an HTTP client, and a network of peers."""

    network: MemoryNetwork
    worker: MemoryEndpoint
    server: MemoryEndpoint
    data: MemoryEndpoint
    outsider: MemoryEndpoint
    config: TrainConfig
    queue: ReceiveQueue
    work_dir: Path
    socket: Path
    client: httpx.AsyncClient
    served: dict[tuple[str, int], bytes] = field(default_factory=dict)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        answer = await self.client.post(path, json=body)
        return answer.status_code, answer.json()

    async def kind(self, path: str, body: Any) -> tuple[int, str]:
        status, answer = await self.post(path, body)
        assert set(answer) == {"error", "detail"}
        return status, answer["error"]

    async def push(
        self, sender: MemoryEndpoint, number: int, content: bytes, kind: str = OUTER_UPDATE, name: str = "u"
    ) -> None:
        size, digest = await transfer.describe(content)
        header = PushHeader(ATTEMPT, number, kind, name, size, digest, scheduler=self.server.peer_id)
        await transfer.push(sender, self.worker.peer_id, content, header)

    def assign(self, *answers: SliceAssigned | SlicesAssigned) -> list[DataRequest]:
        """Let the scheduler answer requests of slices in turn; return the requests."""
        requests: list[DataRequest] = []

        async def answer(_peer: Any, request: DataRequest) -> SliceAssigned | SlicesAssigned:
            requests.append(request)
            return answers[len(requests) - 1]

        rpc.serve(self.server, DATA, answer)
        return requests

    @property
    def results(self) -> Any:
        return {"resource": plain(self.config.results), "path": "incoming"}


def digest_of(content: bytes) -> str:
    return f"blake3:{blake3(content).hexdigest()}"


def plain(reference: Any) -> Any:
    return to_plain(Reference, reference)


@asynccontextmanager
async def open_test_bridge(
    tmp_path: Path,
    short: Path,
    access: AccessPolicy | None = None,
    on_disk_fault: Callable[[object], None] = fail_for_disk,
) -> AsyncIterator[BridgeUnderTest]:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        names = ("worker", "server", "data", "outsider")
        worker, server, data, outsider = [await stack.enter_async_context(network.endpoint(name)) for name in names]
        artifact = PeersReference(
            peers=(data.peer_id, server.peer_id),
            strategy=One(),
            resource=SliceAddress(dataset="job/model", index=0),
            filenames=("config.json", "sub/model.safetensors"),
        )
        model = Model(task="auto", artifact=artifact, input_names=("x",))
        config = training(server.peer_id, model=model, batch_size=1)
        context = make_context(tmp_path, worker, server.peer_id, config, limit=LIMIT, access=access)
        under_test, backend = make_bridge(context, on_disk_fault)
        path = short / "b.sock"
        client = await stack.enter_async_context(open_client(backend, path))
        queue, work_dir = under_test.queue, context.work_dir
        bridge = BridgeUnderTest(network, worker, server, data, outsider, config, queue, work_dir, path, client)

        async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
            found = bridge.served.get((request.dataset, request.index))
            return Refusal(reason="not here") if found is None else transfer.PullSource(found)

        transfer.serve_pulls(data, resolve)
        try:
            yield bridge
        finally:
            under_test.close()


@pytest.fixture
def with_bridge(tmp_path: Path, short: Path) -> Callable[..., Any]:
    return partial(open_test_bridge, tmp_path, short)


WithBridge = Callable[..., Any]


async def test_an_executor_that_disconnects_mid_request_is_not_logged_as_an_error(
    with_bridge: WithBridge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with with_bridge() as bridge:
        async with await anyio.connect_unix(bridge.socket) as half:
            head = b"POST /status/send HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            await half.send(head + b"Expect: 100-continue\r\n\r\n")
            assert (await half.receive()).startswith(b"HTTP/1.1 100")  # the body is awaited
        while "disconnected before the end" not in caplog.text:
            await anyio.sleep(0.02)
        assert (await bridge.client.get("/openapi.json")).status_code == 200
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_the_bridge_serves_its_description_on_a_private_socket(with_bridge: WithBridge, short: Path) -> None:
    async with with_bridge() as bridge:
        described = (await bridge.client.get("/openapi.json")).json()
        routes = {"/resources/fetch", "/resources/send", "/resources/receive", "/status/send", "/telemetry/spans"}
        routes |= {"/task/update", "/rounds/join", "/status/batches"}
        assert set(described["paths"]) == routes
        named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
        assert named == set(described["components"]["schemas"])
        assert stat.S_IMODE(bridge.socket.stat().st_mode) == 0o600
    assert list(short.iterdir()) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b", "link/x", "a\0b", "x" * 2000, "folder"])
async def test_paths_out_of_the_work_directory_are_refused(with_bridge: WithBridge, path: str) -> None:
    async with with_bridge() as bridge:
        (bridge.work_dir / "link").symlink_to("/tmp")
        (bridge.work_dir / "folder").mkdir()
        body = {"resource": plain(bridge.config.updates), "path": path}
        status, kind = await bridge.kind("/resources/send", body)
        assert (status, kind) == ((404, "not-found") if path == "folder" else (400, "bad-request"))
        if path != "folder":
            assert await bridge.kind("/resources/receive", {**bridge.results, "path": path}) == (400, "bad-request")
        assert bridge.server.traffic.received == 0


async def test_invalid_bodies_are_refused(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        for route in ("fetch", "send", "receive"):
            for body in ([], {}, 3, {"resource": {"type": "moon"}, "path": "x"}, {"resource": {}, "path": 7}):
                assert await bridge.kind(f"/resources/{route}", body) == (400, "bad-request")
            answer = await bridge.client.post(f"/resources/{route}", content=b"{" * 100_000)
            assert (answer.status_code, answer.json()["error"]) == (400, "bad-request")
            answer = await bridge.client.post(f"/resources/{route}", content=b" " * ((1 << 20) + 1))
            assert (answer.status_code, answer.json()["error"]) == (413, "too-large")
        huge = {"resource": {"type": "uri", "value": f"file:///{'x' * 90_000}"}, "path": "x"}
        answer = await bridge.client.post("/resources/fetch", json=huge)
        assert len(detail := answer.json()["detail"]) == 4000
        assert detail.endswith("ask its owner to add one")
        for progress in ("moon", {"status": {}}, {"status": {"batch_size": -1}}, None):
            assert await bridge.kind("/status/send", progress) == (400, "bad-request")
        least = {"round": 1, "first": 0, "batches": [{"batch_size": 8}]}
        for batches in (3, {}, least | {"batches": []}, least | {"batches": [{}]}, least | {"first": -1}):
            assert await bridge.kind("/status/batches", batches) == (400, "bad-request")
        assert await bridge.kind("/status/batches", least | {"batches": [{"batch_size": 8}] * 257}) == (
            400,
            "bad-request",
        )
        assert (await bridge.client.post("/nothing")).status_code == 404


@pytest.mark.usefixtures("quick_retries")
async def test_files_of_a_model_are_fetched_from_the_first_peer_that_has_them(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        bridge.served |= {("job/model", 0): b"{}", ("job/model", 1): b"weights"}
        model = plain(bridge.config.model.artifact)
        reversed_peers = {**model, "peers": model["peers"][::-1]}  # the first peer serves nothing
        status, files = await bridge.post("/resources/fetch", {"resource": reversed_peers, "path": "model"})
        assert status == 200, files
        assert [file["path"] for file in files] == ["model/config.json", "model/sub/model.safetensors"]
        for file in files:
            content = (bridge.work_dir / file["path"]).read_bytes()
            assert file["size"] == len(content)
            assert file["checksum"].startswith("blake3:")
            assert file["metadata"]["source"] == f"peer:{bridge.data.peer_id}"
        for names in (["../x"], ["/x"]):
            for reference in (model, {"type": "huggingface", "repository": "org/model"}):
                body = {"resource": {**reference, "filenames": names}, "path": "model"}
                assert await bridge.kind("/resources/fetch", body) == (400, "bad-request")
        missing = {**model, "resource": {"dataset": "nothing", "index": 0}}
        assert await bridge.kind("/resources/fetch", missing) == (502, "peer-failed")


async def test_the_documented_request_form_is_accepted(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        bridge.served["d", 3] = b"s"
        peers = [str(bridge.data.peer_id)]
        wanted = {"type": "Peers", "peers": peers, "strategy": "One", "resource": {"dataset": "d", "index": 3}}
        status, [file] = await bridge.post("/resources/fetch", {"fetch": wanted, "out_dir": "in"})
        assert status == 200
        assert file["path"] == "in/d-3.safetensors"
        status, [file] = await bridge.post("/resources/fetch", wanted)
        assert status == 200
        assert (bridge.work_dir / file["path"]).read_bytes() == b"s"


async def test_a_bare_reference_is_fetched_into_artifacts(with_bridge: WithBridge) -> None:
    slices = {7: b"slice 7", 8: b"slice 8"}
    async with with_bridge() as bridge:
        provider = bridge.data.peer_id
        bridge.assign(*(SliceAssigned(provider, index, digest=digest_of(content)) for index, content in slices.items()))
        bridge.served |= {("job/model", 0): b"{}", ("job/model", 1): b"weights"}
        status, files = await bridge.post("/resources/fetch", plain(bridge.config.model.artifact))
        assert status == 200, files
        assert [file["path"] for file in files] == ["artifacts/config.json", "artifacts/sub/model.safetensors"]
        for index, content in slices.items():  # the next slice takes the place of the one before
            bridge.served["digits", index] = content
            status, [file] = await bridge.post("/resources/fetch", plain(bridge.config.data))
            assert (status, file["path"], file["metadata"]["slice"]) == (200, "artifacts/0", str(index))
            assert (bridge.work_dir / file["path"]).read_bytes() == content
        assert sorted(path.name for path in (bridge.work_dir / "artifacts").iterdir()) == ["0", "config.json", "sub"]


@pytest.mark.parametrize(
    ("form", "suffix"), [(None, "safetensors"), ("safetensors", "safetensors"), ("jsonl", "jsonl")]
)
async def test_a_slice_is_named_by_its_format(with_bridge: WithBridge, form: str | None, suffix: str) -> None:
    async with with_bridge() as bridge:
        content = bridge.served["digits", 7] = b'{"text": "a"}\n'
        bridge.assign(SliceAssigned(bridge.data.peer_id, 7, digest=digest_of(content), format=form))
        wanted = {"fetch": plain(bridge.config.data), "out_dir": "data"}
        status, [file] = await bridge.post("/resources/fetch", wanted)
        assert (status, file["path"]) == (200, f"data/digits-7-1.{suffix}")


async def test_several_slices_are_fetched_with_one_request(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        about = {"data_provider": bridge.data.peer_id, "digest": digest_of(b"slice")}
        three = SlicesAssigned(slices=tuple(AssignedSlice(index=index, **about) for index in (7, 8, 9)))
        another = SliceAssigned(index=10, **about)
        requests = bridge.assign(three, another, three, three, another, another)

        async def fetched(**wanted: Any) -> tuple[int, Any]:
            return await bridge.post("/resources/fetch", {"fetch": plain(bridge.config.data), "out_dir": "s", **wanted})

        bridge.served |= {("digits", index): b"slice" for index in (0, 7, 9, 10)}  # 0: its manifest
        status, files = await fetched(count=4, ahead=True)
        assert status == 200, files
        assert [file["metadata"]["slice"] for file in files] == ["7", "10", "9"]  # none has slice 8
        assert [file["metadata"]["assigned"] for file in files] == ["0", "3", "2"]
        assert all((bridge.work_dir / file["path"]).read_bytes() == b"slice" for file in files)
        assert [(request.most, request.ahead) for request in requests] == [(4, True), (None, True)]
        assert requests[1].unusable is not None
        assert requests[1].unusable.index == 8

        status, answer = await fetched(count=2)
        assert (status, answer["detail"]) == (502, "the scheduler assigned 3 slices and was asked for 1 to 2")
        del bridge.served["digits", 7], bridge.served["digits", 10]
        status, [file] = await fetched(count=3)  # what can be had is kept
        assert (status, file["metadata"]["slice"]) == (200, "9")
        for count in (0, 33):
            status, answer = await fetched(count=count)
            assert (status, answer["detail"]) == (400, "fetch: count: integer is out of range 1..32")
        status, answer = await fetched(count=2, fetch=plain(bridge.config.model.artifact))
        assert status == 400
        assert answer["detail"].startswith("count: only slices of a scheduler's dataset are fetched several at a time")
        status, answer = await fetched(ahead=True, fetch=plain(bridge.config.model.artifact))
        assert (status, "ahead: only slices of a scheduler's dataset" in answer["detail"]) == (400, True)


async def test_a_slice_of_an_unknown_format_is_not_fetched(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        bridge.assign(SliceAssigned(bridge.data.peer_id, 7, format="../parquet"))
        wanted = {"fetch": plain(bridge.config.data), "out_dir": "data"}
        status, answer = await bridge.post("/resources/fetch", wanted)
        assert status == 502
        assert answer["detail"] == (
            "the scheduler assigned a slice of the format '../parquet', and this worker knows safetensors, jsonl: "
            "update hypha-worker"
        )


async def read_events(bridge: BridgeUnderTest, count: int, body: Any = None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with bridge.client.stream("POST", "/resources/receive", json=body or bridge.results) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == count:
                    break
    return events


async def test_pushed_files_are_queued_and_delivered_once(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        await bridge.push(bridge.server, 1, b"one")
        await bridge.push(bridge.server, 1, b"one")  # again: its receipt was lost
        with pytest.raises(transfer.TransferRefusedError):
            await bridge.push(bridge.outsider, 2, b"two")
        await bridge.push(bridge.server, 2, b"two")
        events = await read_events(bridge, 2)
        assert [(event["round"], event["sequence"]) for event in events] == [(1, 0), (2, 1)]
        assert [(bridge.work_dir / event["path"]).read_bytes() for event in events] == [b"one", b"two"]
        assert all(event["path"].startswith("incoming/") for event in events)
        assert events[0]["from_peer"] == str(bridge.server.peer_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bridge.push, bridge.server, 3, b"three")
            [event] = await read_events(bridge, 1)
        assert (event["round"], event["size"], event["kind"]) == (3, 5, OUTER_UPDATE)


async def test_with_two_streams_each_file_goes_to_one_of_them(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        seen: list[int] = []
        opened: list[int] = []

        async def read() -> None:
            async with bridge.client.stream("POST", "/resources/receive", json=bridge.results) as answer:
                opened.append(answer.status_code)
                async for line in answer.aiter_lines():
                    seen.extend([json.loads(line[6:])["round"]] if line.startswith("data: ") else [])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)
            while len(opened) < 2:
                await anyio.sleep(0.01)
            for number in range(1, 6):
                await bridge.push(bridge.server, number, b"%d" % number)
            while len(seen) < 5:
                await anyio.sleep(0.01)
            bridge.queue.close()
        assert sorted(seen) == [1, 2, 3, 4, 5]


async def test_a_failing_disk_is_answered_with_an_error(
    with_bridge: WithBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "pull", full)
    told: list[object] = []
    async with with_bridge(on_disk_fault=told.append) as bridge:
        model = plain(bridge.config.model.artifact)
        answer = await bridge.client.post("/resources/fetch", json={"resource": model, "path": "in"})
        assert (answer.status_code, answer.json()["error"]) == (500, "worker-failed")
        assert "No space left" in answer.json()["detail"]
    assert "No space left" in str(told)


async def test_a_stream_closed_while_waiting_loses_no_file(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        for _ in range(3):
            async with bridge.client.stream("POST", "/resources/receive", json=bridge.results) as answer:
                assert answer.status_code == 200
        await bridge.push(bridge.server, 1, b"one")
        assert [event["round"] for event in await read_events(bridge, 1)] == [1]


async def test_strangers_push_nothing_and_only_senders_of_results_push_outer_updates(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        for sender, kind in ((bridge.outsider, OTHER_FILE), (bridge.data, OUTER_UPDATE)):
            with pytest.raises(transfer.TransferRefusedError):
                await bridge.push(sender, 1, b"x", kind)


async def test_files_of_every_peer_and_kind_of_the_job_are_received(with_bridge: WithBridge) -> None:
    """The request names no peers, as in the documentation."""
    everyone = {"receive": {"type": "Peers", "peers": [], "strategy": "All"}, "out_dir": "incoming"}
    async with with_bridge() as bridge:
        pushed = [(bridge.server, OUTER_UPDATE), (bridge.data, OTHER_FILE), (bridge.server, PSEUDO_GRADIENT)]
        for number, (sender, kind) in enumerate(pushed):
            await bridge.push(sender, number, b"%d" % number, kind)
        events = await read_events(bridge, 3, everyone)
        seen = [(event["from_peer"], event["kind"], event["sequence"], event["round"]) for event in events]
        assert seen == [(str(sender.peer_id), kind, n, n) for n, (sender, kind) in enumerate(pushed)]


async def test_other_files_do_not_keep_outer_updates_out(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        for number in range(QUEUE_LIMIT):
            await bridge.push(bridge.data, number, b"x", OTHER_FILE)
        with pytest.raises(transfer.TransferRefusedError, match="queue is full"):
            await bridge.push(bridge.data, QUEUE_LIMIT, b"x", OTHER_FILE)
        await bridge.push(bridge.server, 1, b"outer")
        [event] = await read_events(bridge, 1)
        assert event["kind"] == OUTER_UPDATE


async def test_received_files_keep_their_names_unless_these_are_taken(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        (bridge.work_dir / "incoming").mkdir()
        (bridge.work_dir / "incoming" / "chunk-2.bin").symlink_to("nowhere")
        names = ["chunk-0.bin", "chunk-0.bin", "chunk-2.bin", "../a b", ".hidden", "chunk-0.bin"]
        for number, name in enumerate(names):
            await bridge.push(bridge.server, number, b"%d" % number, name=name)
        events = await read_events(bridge, len(names))
        assert [event["path"].removeprefix("incoming/") for event in events] == [
            "chunk-0.bin",
            "chunk-0-1.bin",
            "chunk-2-1.bin",
            "a-b",
            "hidden",
            "chunk-0-2.bin",
        ]
        assert [event["sequence"] for event in events] == list(range(len(names)))
        for number, event in enumerate(events):
            assert (bridge.work_dir / event["path"]).read_bytes() == b"%d" % number


def collect_pushes(bridge: BridgeUnderTest, endpoint: MemoryEndpoint) -> list[PushHeader]:
    """Accept every push to an endpoint; returns the list of their headers."""
    headers: list[PushHeader] = []

    async def accept(_peer: Any, header: PushHeader) -> transfer.FilePushTarget:
        headers.append(header)

        async def done(_size: int, _digest: str) -> None:
            return

        return transfer.FilePushTarget(bridge.work_dir.parent / f"{uuid.uuid4()}", LIMIT, done)

    transfer.serve_pushes(endpoint, accept)
    return headers


async def test_a_file_to_peers_that_get_updates_is_an_update(with_bridge: WithBridge) -> None:
    """The reference may be spelled differently from the job's own; other files have a numbering of their own."""
    async with with_bridge() as bridge:
        server, data = collect_pushes(bridge, bridge.server), collect_pushes(bridge, bridge.data)
        (bridge.work_dir / "f").write_bytes(b"x")

        async def send(strategy: str, *peers: MemoryEndpoint) -> None:
            reference = {"type": "Peers", "peers": [str(peer.peer_id) for peer in peers], "strategy": strategy}
            status, answer = await bridge.post("/resources/send", {"send": reference, "path": "f"})
            assert status == 200, answer

        for strategy in ("All", "One", "Random"):
            await send(strategy, bridge.server)
            await send(strategy, bridge.data)
        await send("All", bridge.data, bridge.server)
        updates = [(PSEUDO_GRADIENT, number) for number in (1, 2, 3)]
        files = [(OTHER_FILE, number) for number in (1, 2, 3, 4)]
        assert [(header.kind, header.round) for header in server] == [*updates, files[-1]]
        assert [(header.kind, header.round) for header in data] == files


async def test_refused_requests_name_field_value_and_remedy(with_bridge: WithBridge) -> None:
    kinds = {400: "bad-request", 403: "not-allowed", 404: "not-found"}
    async with with_bridge() as bridge:
        (bridge.work_dir / "f").write_bytes(b"x")
        updates = plain(bridge.config.updates)
        outsider = {**updates, "peers": [str(bridge.outsider.peer_id)]}
        elsewhere = {**outsider, "resource": {"dataset": "d", "index": 0}}
        scheduler = plain(SchedulerReference(peer=bridge.server.peer_id, dataset="other"))
        for route, resource, path, status, told in (
            ("send", updates, "/etc/passwd", 400, ["path: '/etc/passwd'", "name one"]),
            ("send", updates, "none", 404, ["path: 'none'", "write the file first"]),
            ("send", {**updates, "peers": []}, "f", 400, ["peers: []", "name one or more"]),
            ("send", scheduler, "f", 400, ["type: 'scheduler'", 'use "peers"']),
            ("send", outsider, "f", 403, [f"peers: {bridge.outsider.peer_id}", str(bridge.server.peer_id)]),
            ("receive", outsider, "in", 403, [f"peers: {bridge.outsider.peer_id}", str(bridge.server.peer_id)]),
            ("receive", updates, "f", 400, ["path: 'f' is a file", "another path"]),
            ("receive", scheduler, "in", 400, ["type: 'scheduler'", 'use "peers"']),
            ("fetch", updates, "in", 400, ["resource: none", "add"]),
            ("fetch", elsewhere, "in", 403, [f"peers: {bridge.outsider.peer_id}"]),
            ("fetch", scheduler, "in", 403, ["dataset: 'other'", "fetch 'digits'"]),
        ):
            found, answer = await bridge.post(f"/resources/{route}", {"resource": resource, "path": path})
            assert (found, answer["error"]) == (status, kinds[status]), answer
            assert all(text in answer["detail"] for text in told), answer["detail"]


@pytest.mark.parametrize("stuck", ["unread", "waiting"])
async def test_the_bridge_closes_in_bounded_time_with_stuck_clients(tmp_path: Path, short: Path, stuck: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        async with open_test_bridge(tmp_path, short) as bridge:
            client.connect(str(bridge.socket))
            if stuck == "unread":  # more responses than the socket buffers
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400)
            else:  # a request whose body never arrives
                head = b"POST /resources/fetch HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
                client.sendall(head + b"expect: 100-continue\r\n\r\n")
            await anyio.wait_readable(client)
    assert list(short.iterdir()) == []


async def test_a_bridge_whose_clients_are_gone_closes_without_a_pause(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn alone pauses 0.1 s, twice."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    path = short / "b.sock"
    async with (
        open_bridge(cast(Any, None), SocketPlace(path), lambda _pid: True),
        await anyio.connect_unix(path) as client,
    ):
        await client.send(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        assert (await client.receive()).startswith(b"HTTP/1.1 404")
    assert not any(pauses)


async def test_a_call_that_waits_for_a_peer_is_cancelled_when_the_bridge_closes(tmp_path: Path, short: Path) -> None:
    async with anyio.create_task_group() as tasks, open_test_bridge(tmp_path, short) as bridge:
        asked = anyio.Event()

        async def never(_stream: Any) -> None:
            asked.set()
            await anyio.sleep_forever()

        bridge.server.handle("/hypha-progress/0.0.1", never)

        async def report() -> None:
            try:
                await bridge.client.post("/status/send", json="update")
            except httpx.HTTPError:
                return

        tasks.start_soon(report)
        await asked.wait()


async def test_a_bridge_that_is_cancelled_before_it_has_begun_closes(short: Path) -> None:
    for delay in (0.0, 0.001, 0.01, 0.1):
        with anyio.move_on_after(delay):
            async with open_bridge(None, SocketPlace(short / "b.sock"), lambda _pid: True):  # type: ignore[arg-type]
                await anyio.sleep_forever()
    assert list(short.iterdir()) == []


@pytest.mark.skipif(getrlimit(RLIMIT_NOFILE)[1] < 2048, reason="needs descriptors from 1024 on")
async def test_a_connection_is_seen_whatever_number_the_descriptor_has(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def bind_with_large_descriptor(place: SocketPlace) -> Iterator[socket.socket]:
        with (
            bind_socket(place) as listener,
            socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, 1500)) as same,
        ):
            yield same

    soft, hard = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (max(soft, 2048), hard))
    monkeypatch.setattr("hypha_worker.bridge.server.bind_socket", bind_with_large_descriptor)
    path = short / "b.sock"
    try:
        async with open_bridge(cast(Any, None), SocketPlace(path), lambda _pid: True) as bridge:
            assert not bridge.was_used()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                assert bridge.was_used()
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))


async def test_the_server_begins_with_the_first_connection(
    with_bridge: WithBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[uvicorn.Server] = []
    run = uvicorn.Server.run

    def counted(server: uvicorn.Server, sockets: Any = None) -> None:
        begun.append(server)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", counted)

    async def check_described(bridge: BridgeUnderTest) -> None:
        assert (await bridge.client.get("/openapi.json")).status_code == 200

    async with with_bridge() as bridge:
        assert begun == []
        async with anyio.create_task_group() as tasks:  # connections that arrive before it has begun
            for _ in range(5):
                tasks.start_soon(check_described, bridge)
        assert len(begun) == 1


async def test_a_first_request_while_the_job_is_ended_is_answered(tmp_path: Path, short: Path) -> None:
    """As by an executor that reports when it gets SIGTERM."""
    answers: list[tuple[int, str]] = []
    with anyio.fail_after(30), anyio.CancelScope() as job:
        async with open_test_bridge(tmp_path, short) as bridge:
            job.cancel()
            with anyio.CancelScope(shield=True):
                answers.append(await bridge.kind("/status/send", "update"))
    assert answers == [(503, "ending")]


async def test_a_server_that_ends_by_itself_ends_the_job(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: None)
    with pytest.raises(ExceptionGroup) as raised:
        with anyio.fail_after(30):
            path = short / "b.sock"
            async with (
                open_bridge(cast(Any, None), SocketPlace(path), lambda _pid: True),
                await anyio.connect_unix(path),
            ):
                await anyio.sleep_forever()
    error = first_leaf_error(raised.value)
    assert isinstance(error, BridgeStartError)
    assert "ended while the job was running" in str(error)


async def test_only_processes_of_the_job_are_answered(short: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def is_own(pid: int) -> bool:
        asked.append(pid)
        return len(asked) == 3

    path, answers = short / "b.sock", []
    async with open_bridge(cast(Any, None), SocketPlace(path), is_own):
        for _ in range(3):
            async with await anyio.connect_unix(path) as client:
                with suppress(anyio.BrokenResourceError):  # a foreign process is answered before it has asked
                    await client.send(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
                answers.append(await client.receive())
    *foreign, own = answers
    assert asked == [os.getpid()] * 3
    assert all(answer.startswith(b"HTTP/1.1 403") and b"foreign-process" in answer for answer in foreign)
    assert own.startswith(b"HTTP/1.1 404")
    assert caplog.text.count("is refused at the bridge of a job that it does not belong to") == 1


async def test_a_too_long_socket_path_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(BridgeStartError, match=r"limit of 107 bytes.*TMPDIR"):
        async with open_bridge(None, SocketPlace(tmp_path / ("x" * 120)), lambda _pid: True):  # type: ignore[arg-type]
            pass


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.settimeout(30)
    return client


def ask(client: socket.socket, *, close: bool = False) -> int:
    """Send a request; return the status of the answer."""
    ending = b"connection: close\r\n" if close else b""
    client.sendall(b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n" + ending + b"\r\n")
    return read_answer(client)[0]


def read_answer(client: socket.socket) -> tuple[int, Any]:
    """Return the status and the body of an answer."""
    with http.client.HTTPResponse(client) as answer:
        answer.begin()
        return answer.status, json.loads(answer.read())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_job_has_a_limited_number_of_connections(with_bridge: WithBridge) -> None:
    """Idle ones count, those that are there go on, and however many come at once, few are open at the worker."""

    def use(path: Path) -> None:
        with ExitStack() as stack:
            first = stack.enter_context(connect(path))
            assert ask(first) == 404
            before = open_files()
            idle = [stack.enter_context(connect(path)) for _ in range(MAX_CONNECTIONS - 1)]
            further = [stack.enter_context(connect(path)) for _ in range(200)]
            for client in further:
                status, answer = read_answer(client)
                assert (status, answer["error"]) == (503, "too-many-connections")
                assert client.recv(1) == b""
            assert open_files() - before <= len(idle) + len(further) + MAX_CONNECTIONS + 2
            assert ask(first) == 404
            assert all(ask(client) == 404 for client in idle)
            assert ask(idle.pop(), close=True) == 404  # makes room for another
            assert ask(stack.enter_context(connect(path))) == 404

    async with with_bridge() as bridge:
        await anyio.to_thread.run_sync(use, bridge.socket)


async def test_a_refused_client_that_sends_at_once_reads_the_reason(with_bridge: WithBridge) -> None:
    async with with_bridge() as bridge:
        async with AsyncExitStack() as stack:
            for _ in range(MAX_CONNECTIONS):
                await stack.enter_async_context(await anyio.connect_unix(bridge.socket))
            status, answer = await bridge.post("/resources/fetch", bridge.results)
            assert (status, answer["error"]) == (503, "too-many-connections")
            assert "64 connections" in answer["detail"]
        while (await bridge.client.get("/openapi.json")).status_code != 200:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("long", [False, True])
def test_the_socket_lies_in_the_jobs_folder_or_is_linked_there(short: Path, long: bool) -> None:
    (work_dir := short / ("job" * 40 if long else "job")).mkdir()
    place = choose_place(work_dir, short)
    with bind_socket(place):
        found = work_dir / "bridge.sock"
        assert stat.S_IMODE(found.stat().st_mode) == 0o600
        assert found.is_symlink() is long
        assert place.path.resolve() == found.resolve()
        connect(place.path).close()
    assert not place.path.exists()


@pytest.mark.parametrize("put", ["link", "folder", "nothing"])
def test_what_a_job_puts_in_the_place_of_its_socket_is_not_followed(tmp_path: Path, short: Path, put: str) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "bridge.sock").write_text("kept")
    (work_dir := short / "job").mkdir()
    place = choose_place(work_dir, short)
    with bind_socket(place):
        place.path.unlink()
        if put == "link":
            place.path.symlink_to(outside / "bridge.sock")
        elif put == "folder":
            work_dir.rename(short / "moved")
            work_dir.symlink_to(outside)
    assert (outside / "bridge.sock").read_text() == "kept"


def local(path: Path) -> Any:
    """Return the body of a fetch of a file of the machine."""
    return {"resource": plain(UriReference(value=path.as_uri())), "path": "in"}


async def test_local_files_need_an_allowed_root(with_bridge: WithBridge, tmp_path: Path) -> None:
    root = tmp_path / "allowed"
    root.mkdir()
    (root / "model.bin").write_bytes(b"model")
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", root / "link")
    async with with_bridge(access=AccessPolicy(roots=(root,))) as bridge:
        status, [file] = await bridge.post("/resources/fetch", local(root / "model.bin"))
        assert status == 200
        assert (bridge.work_dir / file["path"]).read_bytes() == b"model"
        assert file["checksum"].startswith("sha256:")
        for path in (tmp_path / "secret", root / "link", root / ".." / "secret", Path("/x/../etc/passwd")):
            assert await bridge.kind("/resources/fetch", local(path)) == (403, "not-allowed")
        assert await bridge.kind("/resources/fetch", local(root / "none")) == (404, "not-found")


async def test_a_folder_under_an_allowed_root_is_fetched_with_its_files(
    with_bridge: WithBridge, tmp_path: Path
) -> None:
    root = tmp_path / "allowed"
    (root / "model" / "deep").mkdir(parents=True)
    (root / "model" / "config.json").write_bytes(b"{}")
    (root / "model" / "deep" / "weights").write_bytes(b"weights")
    async with with_bridge(access=AccessPolicy(roots=(root,))) as bridge:
        for _ in range(2):
            status, files = await bridge.post("/resources/fetch", local(root / "model"))
            assert status == 200
            assert sorted(file["path"] for file in files) == ["in/config.json", "in/deep/weights"]
            assert (bridge.work_dir / "in" / "deep" / "weights").read_bytes() == b"weights"
        (root / "model" / "link").symlink_to(tmp_path)
        assert await bridge.kind("/resources/fetch", local(root / "model")) == (403, "not-allowed")
