"""Transfers from files and memory into files: the same protocol and rules for each source, over either network."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoint_helpers import next_event, push_header
from support.gateways import Opener

from hypha_net import retries, transfer
from hypha_net.bandwidth import BURST
from hypha_net.endpoint import Endpoint
from hypha_net.events import EventFollower, Transferred
from hypha_net.retries import RetryPolicy
from hypha_net.testing import Faults, MemoryNetwork, simulate
from hypha_net.transfer.framing import receive_message, send_message
from hypha_net.transfer.io.partial_file import MIN_RESUMABLE
from hypha_proto.codec import to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PUSH
from hypha_proto.transfer import PullRequest, PushHeader

Kind = Literal["file", "memory"]
KINDS: tuple[Kind, ...] = ("file", "memory")

SIZE = 8 << 20
CUT_AT = 3 << 20
LIMIT = 16 << 20
REQUEST = PullRequest(dataset="d", index=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.05, 0.05, 0.05)))


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digest_of(data: bytes | bytearray) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def header_of(data: bytes, name: str = "update", task: str = "train") -> PushHeader:
    return push_header(len(data), digest_of(data), name, task)


@dataclass
class Mover:
    """Transfers content between two nodes, from and to the kinds that a test chooses."""

    how: Literal["push", "pull"]
    giver: Endpoint
    taker: Endpoint
    folder: Path
    landed: list[bytes] = field(default_factory=list)

    async def move(self, data: bytes, source: Kind) -> int | None:
        """Transfer the content once; return what `push` returned."""
        self.folder.mkdir(exist_ok=True)
        given: Path | bytes = data
        if source == "file":
            given = self.folder.with_name("given")
            given.write_bytes(data)
        if self.how == "push":
            return await self._push(data, given)
        await self._pull(given)
        return None

    @property
    def serving(self) -> Endpoint:
        """The node that serves."""
        return self.taker if self.how == "push" else self.giver

    async def _push(self, data: bytes, given: Path | bytes) -> int:
        done = anyio.Event()

        async def arrived(size: int, digest: str) -> None:
            landed = (self.folder / "landed").read_bytes()
            assert (size, digest) == (len(landed), digest_of(landed))
            self.landed.append(landed)
            done.set()

        async def accept(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget:
            return transfer.FilePushTarget(self.folder / "landed", LIMIT, arrived)

        transfer.serve_pushes(self.taker, accept)
        sent = await transfer.push(self.giver, self.taker.peer_id, given, header_of(data))
        await done.wait()
        return sent

    async def _pull(self, given: Path | bytes) -> None:
        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource:
            assert (request.dataset, request.index) == ("d", 2)
            return transfer.PullSource(given)

        transfer.serve_pulls(self.giver, resolve)
        path = self.folder / "landed"
        await transfer.pull(self.taker, self.giver.peer_id, REQUEST, path, max_bytes=LIMIT)
        self.landed.append(path.read_bytes())


each_way = pytest.mark.parametrize("how", ["push", "pull"])


# ----------------------------------------------------------------------------------------------------------- transfers


@each_way
async def test_content_is_transferred_from_files_and_memory(
    opener: Opener, tmp_path: Path, how: Literal["push", "pull"]
) -> None:
    async with opener(3) as (_, a, b):
        mover = Mover(how, a, b, tmp_path / "landing")
        for source, size in product(KINDS, (0, 1, 3_333_333)):
            data = content(size)
            sent = await mover.move(data, source)
            assert mover.landed.pop() == data
            assert sent in (None, size)
        assert [path.name for path in (tmp_path / "landing").iterdir()] == ["landed"]


# ------------------------------------------------------------------------------------------------------------- resuming


async def of_transfer(events: EventFollower) -> Transferred:
    """Return the next transfer event."""
    return await next_event(events, Transferred)


async def disconnect_at(mover: Mover, at: int) -> None:
    with mover.taker.events.follow(Transferred) as events:
        while (await of_transfer(events)).done <= at:
            pass
    await mover.giver.disconnect(mover.taker.peer_id)


async def until_moved(events: EventFollower, size: int) -> None:
    """Wait until `size` bytes were transferred."""
    while (await of_transfer(events)).done < size:
        pass


async def offsets_into(offsets: list[int], serving: Endpoint) -> None:
    """Collect the offset at which the serving node starts each attempt."""
    with serving.events.follow(Transferred) as events:
        while True:
            event = await of_transfer(events)
            offsets += [event.done] if event.state == "begun" else []


@each_way
async def test_interrupted_transfer_resumes_from_files_and_memory(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Literal["push", "pull"]
) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.EVENT_INTERVAL", 0.0)
    async with opener(3) as (_, a, b):
        transfer.limit_bandwidth(
            b, transfer.BandwidthLimits(download=20 << 20)
        )  # slow enough to be interrupted half way
        for seed, source in enumerate(KINDS):
            mover, offsets, data = Mover(how, a, b, tmp_path / "landing"), list[int](), content(SIZE, seed)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offsets_into, offsets, mover.serving)
                tasks.start_soon(disconnect_at, mover, CUT_AT)
                await mover.move(data, source)
                tasks.cancel_scope.cancel()
            assert mover.landed == [data]
            assert offsets[0] == 0
            assert offsets[-1] >= MIN_RESUMABLE


async def test_repeated_buffer_push_takes_over_from_one_that_hangs(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.EVENT_INTERVAL", 0.0)
    data = content(SIZE)
    async with opener(3) as (_, a, b):
        offsets: list[int] = []
        mover = Mover("push", a, b, tmp_path / "landing")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offsets_into, offsets, b)
            await mover.move(b"", "memory")
            with b.events.follow(Transferred) as events:
                stream = await a.open_stream(b.peer_id, [PUSH])
                await send_message(stream, to_cbor(PushHeader, header_of(data)))
                await receive_message(stream)
                await stream.send_all(data[:CUT_AT])  # and no more, although the connection stays open
                await until_moved(events, CUT_AT)
            assert await transfer.push(a, b.peer_id, data, header_of(data)) < SIZE
            tasks.cancel_scope.cancel()
        assert mover.landed == [b"", data]
        assert offsets[-1] >= MIN_RESUMABLE


@pytest.mark.parametrize("differing", ["name", "task"])
async def test_equal_content_under_different_names_or_of_different_tasks_is_independent(
    opener: Opener, tmp_path: Path, differing: Literal["name", "task"]
) -> None:
    data = content(2 << 20)
    headers = [
        header_of(data, f"{number}") if differing == "name" else header_of(data, task=f"train-{number}")
        for number in range(3)
    ]
    async with opener(3) as (_, a, b):
        landed: list[PushHeader] = []

        async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
            async def arrived(_content: object, _digest: str) -> None:
                landed.append(header)

            return transfer.FilePushTarget(tmp_path / f"{headers.index(header)}", LIMIT, arrived)

        transfer.serve_pushes(b, accept)
        sent = list[int]()
        transfer.limit_bandwidth(b, transfer.BandwidthLimits(download=16 << 20))  # slow enough to overlap

        async def push(header: PushHeader) -> None:
            sent.append(await transfer.push(a, b.peer_id, data, header))

        async with anyio.create_task_group() as tasks:
            for header in headers:
                tasks.start_soon(push, header)
        assert sorted(landed, key=headers.index) == headers
        assert sent == [len(data)] * 3  # none was interrupted and repeated


@given(
    how=st.sampled_from(["push", "pull"]),
    source=st.sampled_from(KINDS),
    size=st.integers(0, 16).map(lambda number: number * 333_333),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_received_content_is_intact_on_an_unreliable_link(
    how: Literal["push", "pull"], source: Kind, size: int, seed: int
) -> None:
    data = content(size, seed)

    async def main(folder: Path) -> None:
        network = MemoryNetwork(seed, Faults(break_rate=0.15))  # probability per write
        with anyio.fail_after(30):
            async with network.endpoint("a") as a, network.endpoint("b") as b:
                mover = Mover(how, a, b, folder / "landing")
                await mover.move(data, source)
        assert set(mover.landed) == {data}  # more than once if the receipt was lost
        assert [path.name for path in (folder / "landing").iterdir()] == ["landed"]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.001,) * 200))
        anyio.run(main, Path(folder), backend="trio")


@each_way
async def test_cancelled_transfer_ends_immediately_at_both_ends(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Literal["push", "pull"]
) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.EVENT_INTERVAL", 0.0)
    data = content(SIZE)
    async with opener(3) as (_, a, b):
        mover = Mover(how, a, b, tmp_path / "landing")
        transfer.limit_bandwidth(b, transfer.BandwidthLimits(download=20 << 20))
        with a.events.follow(Transferred) as at_a, b.events.follow(Transferred) as at_b:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mover.move, data, "memory")
                with b.events.follow(Transferred) as events:
                    while (await of_transfer(events)).done <= 2 << 20:
                        pass
                tasks.cancel_scope.cancel()
            for events in (at_a, at_b):
                with anyio.fail_after(15):
                    while (await of_transfer(events)).state != "failed":
                        pass
        assert mover.landed == []


# -------------------------------------------------------------------------------------------------------------- refused


async def test_pull_of_another_digest_fails(opener: Opener, tmp_path: Path) -> None:
    async with opener(3) as (_, a, b):

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(b"these")

        transfer.serve_pulls(b, resolve)
        wanted = digest_of(b"those")
        with pytest.raises(transfer.TransferError, match="is wanted"):
            await transfer.pull(a, b.peer_id, REQUEST, tmp_path / "landed", max_bytes=100, digest=wanted)


# ---------------------------------------------------------------------------------------------------- rates and events


@each_way
@pytest.mark.parametrize("limit", ["upload", "peer_upload", "download", "peer_download"])
def test_transfer_respects_its_bandwidth_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, how: Literal["push", "pull"]
) -> None:
    size, rate = 1 << 20, 1 << 17

    async def run_at_once(job: Callable[..., Any], *arguments: Any) -> Any:
        return job(*arguments)  # the virtual clock does not wait for threads

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_at_once)

    async def main() -> None:
        network = MemoryNetwork()
        async with network.endpoint("a") as a, network.endpoint("b") as b:
            transfer.limit_bandwidth(b if "download" in limit else a, transfer.BandwidthLimits(**{limit: rate}))
            began = anyio.current_time()
            await Mover(how, a, b, tmp_path / "landing").move(content(size), "memory")
            assert size / rate - BURST <= anyio.current_time() - began <= size / rate

    simulate(main)


@each_way
async def test_both_ends_emit_progress_events(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Literal["push", "pull"]
) -> None:
    monkeypatch.setattr("hypha_net.transfer.progress.EVENT_INTERVAL", 0.0)
    async with opener(3) as (_, a, b):
        name = "update" if how == "push" else "d/2"
        with a.events.follow(Transferred) as at_a, b.events.follow(Transferred) as at_b:
            for kind in KINDS:
                await Mover(how, a, b, tmp_path / "landing").move(content(SIZE), kind)
                for events, expected in ((at_a, (b.peer_id, "sent")), (at_b, (a.peer_id, "received"))):
                    told = [await of_transfer(events)]
                    while told[-1].state != "done":
                        told.append(await of_transfer(events))
                    assert {(e.peer, e.direction, e.name, e.size) for e in told} == {(*expected, name, SIZE)}
                    assert (told[0].state, {e.state for e in told[1:-1]}, told[-1].done) == ("begun", {"moving"}, SIZE)
