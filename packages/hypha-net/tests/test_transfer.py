"""Transfers over the in-memory network: interrupted and resumed, refused on a full disk, rate-limited, with events.

Also incomplete files, slots of incoming pushes, and headers on the wire.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.endpoint_helpers import accept_pushes, memory_pair, next_event, push_header
from support.gateways import Opener

from hypha_net import retries, transfer
from hypha_net.bandwidth import BURST
from hypha_net.endpoint import Endpoint
from hypha_net.errors import (
    TransferRefusedError,
)
from hypha_net.events import Transferred
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint, MemoryNetwork, simulate
from hypha_net.token_bucket import TokenBucket
from hypha_net.transfer.framing import MAX_CONCURRENT, TransferInterruptedError, receive_message, send_message
from hypha_net.transfer.io import partial_file
from hypha_net.transfer.push_server import PushSlots
from hypha_proto.codec import to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL, PUSH
from hypha_proto.transfer import NO_ROOM, PullRequest, PushHeader, Refusal

SIZE = 12 << 20
CUT_AT = 5 << 20
REQUEST = PullRequest(dataset="d", index=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.05, 0.05, 0.05)))


@asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[MemoryNetwork, MemoryEndpoint, MemoryEndpoint]]:
    network = MemoryNetwork(seed=3)
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        yield network, a, b


def content(path: Path, seed: int = 0, size: int = SIZE) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


async def cut_once(network: MemoryNetwork, receiver: MemoryEndpoint, sender: MemoryEndpoint) -> None:
    """Break every stream once `CUT_AT` bytes or more were sent; the link works again at once."""
    before = sender.traffic.sent
    while sender.traffic.sent - before < CUT_AT:
        await anyio.sleep(0.001)
    network.partition(receiver.peer_id, sender.peer_id)
    network.heal(receiver.peer_id, sender.peer_id)


def serve_file(node: Endpoint, path: Path) -> list[int]:
    """Serve one file; return the list of requested offsets."""
    offsets: list[int] = []

    async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource:
        offsets.append(request.offset)
        return transfer.PullSource(path)

    transfer.serve_pulls(node, resolve)
    return offsets


# ------------------------------------------------------------------------------------------------------------- resuming


async def _pull_broken(network: MemoryNetwork, a: MemoryEndpoint, b: MemoryEndpoint, target: Path) -> None:
    """Run a pull that is interrupted and not retried."""
    target.parent.mkdir(exist_ok=True)
    usual, retries.TRANSFER = retries.TRANSFER, retries.ONCE  # type: ignore[misc]
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut_once, network, a, b)
            with pytest.raises(transfer.TransferError, match="broke off"):
                await transfer.pull(a, b.peer_id, REQUEST, target)
    finally:
        retries.TRANSFER = usual  # type: ignore[misc]


async def test_next_pull_resumes_a_failed_pull_under_another_name(tmp_path: Path) -> None:
    source, target = content(tmp_path / "source"), tmp_path / "landing" / "target"
    async with open_pair() as (network, a, b):
        offsets = serve_file(b, source)
        await _pull_broken(network, a, b, target)
        other = target.with_name("other")
        _, digest = await transfer.describe(source)
        await transfer.pull(a, b.peer_id, REQUEST, other, digest=digest)
        assert other.read_bytes() == source.read_bytes()
        assert list(target.parent.iterdir()) == [other]
        assert offsets[1] >= partial_file.MIN_RESUMABLE


@pytest.mark.parametrize("shorter", [True, False])
async def test_pull_restarts_when_the_remote_file_has_changed(tmp_path: Path, shorter: bool) -> None:
    source, target = content(tmp_path / "source"), tmp_path / "landing" / "target"
    target.parent.mkdir()
    async with open_pair() as (network, a, b):
        offsets = serve_file(b, source)
        async with anyio.create_task_group() as tasks:

            async def change() -> None:
                await cut_once(network, a, b)
                content(source, 1, 1000 if shorter else SIZE)

            tasks.start_soon(change)
            await transfer.pull(a, b.peer_id, REQUEST, target)
        assert target.read_bytes() == source.read_bytes()
        assert offsets[0] == offsets[-1] == 0
        assert offsets[1] > 0


async def test_corrupted_partial_file_is_resumed_only_once(tmp_path: Path) -> None:
    source, target = content(tmp_path / "source"), tmp_path / "landing" / "target"
    async with open_pair() as (network, a, b):
        offsets = serve_file(b, source)
        await _pull_broken(network, a, b, target)
        [left] = target.parent.iterdir()
        with left.open("r+b") as file:
            file.write(b"spoilt")
        await transfer.pull(a, b.peer_id, REQUEST, target)
        assert target.read_bytes() == source.read_bytes()
        assert list(target.parent.iterdir()) == [target]
        assert offsets[-1] == 0


async def test_only_one_push_per_slot_allocates_disk_space(tmp_path: Path) -> None:
    """A peer that announces large files and sends nothing cannot fill the disk."""
    folder = tmp_path / "landing"
    async with open_pair() as (_network, a, b):
        accept_pushes(b, folder, "updates")
        source = content(tmp_path / "source")
        header = push_header(*await transfer.describe(source))
        for number in range(20):
            stream = await a.open_stream(b.peer_id, [PUSH])
            announced = msgspec.structs.replace(header, size=8 << 20, digest=f"blake3:{number:064x}")
            await send_message(stream, to_cbor(PushHeader, announced))
            await receive_message(stream)
        assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 10 << 20
        await transfer.push(a, b.peer_id, source, header)
        assert (folder / header.name).read_bytes() == source.read_bytes()


async def test_concurrent_pulls_of_the_same_content_are_independent(tmp_path: Path) -> None:
    source, folder = content(tmp_path / "source"), tmp_path / "landing"
    folder.mkdir()
    async with open_pair() as (_network, a, b):
        serve_file(b, source)
        async with anyio.create_task_group() as tasks:
            for name in ("one", "two", "three"):
                tasks.start_soon(transfer.pull, a, b.peer_id, REQUEST, folder / name)
        assert sorted(p.name for p in folder.iterdir()) == ["one", "three", "two"]
        assert all(p.read_bytes() == source.read_bytes() for p in folder.iterdir())


# ----------------------------------------------------------------------------------------------------------- disk space


@pytest.mark.parametrize("fallocate", [True, False])
async def test_full_disk_is_reported_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallocate: bool
) -> None:
    source, target = content(tmp_path / "source"), tmp_path / "landing" / "target"
    target.parent.mkdir()

    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fallocate:
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr(partial_file.shutil, "disk_usage", lambda _folder: type("Usage", (), {"free": 1000})())
    async with open_pair() as (_network, a, b):
        accept_pushes(b, tmp_path / "pushed")
        serve_file(b, source)
        with pytest.raises(transfer.TransferRefusedError, match=r"no room for the file in .*pushed"):
            await transfer.push(a, b.peer_id, source, push_header(*await transfer.describe(source)))
        assert a.traffic.sent < 10_000
        with pytest.raises(transfer.TransferError, match=r"no room for the file in .*landing"):
            await transfer.pull(a, b.peer_id, REQUEST, target)
    assert list(target.parent.iterdir()) == []
    assert list((tmp_path / "pushed").iterdir()) == []


async def test_file_is_sparse_until_complete_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = content(tmp_path / "source")
    monkeypatch.delattr(os, "posix_fallocate")
    async with open_pair() as (_network, a, b):
        serve_file(b, source)
        await transfer.pull(a, b.peer_id, REQUEST, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


# --------------------------------------------------------------------------------------------------------------- events


async def test_failed_transfer_event_has_the_reason(tmp_path: Path) -> None:
    async with open_pair() as (_network, a, b):

        async def refuse(_peer: PeerId, _request: object) -> Refusal:
            return Refusal(reason="no such slice")

        transfer.serve_pulls(b, refuse)
        transfer.serve_pushes(b, refuse)
        with pytest.raises(transfer.TransferRefusedError, match="no such slice"):
            await transfer.push(a, b.peer_id, b"x", push_header(*await transfer.describe(b"x")))
        with a.events.follow(Transferred) as events:
            with pytest.raises(transfer.TransferRefusedError):
                await transfer.pull(a, b.peer_id, REQUEST, tmp_path / "target")
            event = await next_event(events, Transferred)
        assert (event.state, event.name) == ("failed", "d/2")
        assert "no such slice" in event.reason


# ---------------------------------------------------------------------------------------------------- bandwidth limits


@given(st.floats(1e3, 1e9), st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 2)), min_size=1, max_size=60))
def test_token_bucket_never_exceeds_its_rate(rate: float, steps: list[tuple[int, float]]) -> None:
    bucket, now, usable = TokenBucket(rate, rate * BURST), 0.0, []
    for amount, pause in steps:
        now += pause
        usable.append((now + bucket.take(amount, now), amount))
    for index, (begin, _) in enumerate(usable):
        passed = 0
        for at, amount in usable[index + 1 :]:
            passed += amount
            assert passed <= rate * (BURST + at - begin) * (1 + 1e-9) + 1e-3


@given(st.floats(1e3, 1e9), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=60))
def test_token_bucket_uses_its_full_rate(rate: float, amounts: list[int]) -> None:
    bucket, now = TokenBucket(rate, rate * BURST), 0.0
    for amount in amounts:
        now += bucket.take(amount, now)
    assert now <= sum(amounts) / rate * (1 + 1e-9) + 1e-6


@given(st.integers(2, 8))
def test_transfers_share_a_token_bucket_evenly(sharers: int) -> None:
    bucket, clocks, moved = TokenBucket(1e6, 1e6 * BURST), [0.0] * sharers, [0] * sharers
    for _ in range(50 * sharers):
        who = min(range(sharers), key=lambda index: (clocks[index], moved[index]))  # ready first, then waiting longest
        clocks[who] += bucket.take(4096, clocks[who])
        moved[who] += 4096
    assert max(moved) - min(moved) <= 4096


async def test_pulls_that_read_nothing_hold_a_bounded_number_of_files(opener: Opener, tmp_path: Path) -> None:
    """Each would hold a thread, an open file and two blocks; other peers are served meanwhile."""
    source = content(tmp_path / "source")
    async with opener(3) as (giver, greedy, other):
        offsets = serve_file(giver, source)
        streams = []
        for _ in range(3 * MAX_CONCURRENT):
            stream = await greedy.open_stream(giver.peer_id, [PULL])
            await send_message(stream, to_cbor(PullRequest, REQUEST))
            streams.append(stream)
        await transfer.pull(other, giver.peer_id, REQUEST, tmp_path / "target")
        assert len(offsets) == MAX_CONCURRENT + 1
        for stream in streams:
            await stream.reset()
        await transfer.pull(greedy, giver.peer_id, REQUEST, tmp_path / "target")


KEY = (PeerId.from_public_key(bytes(32)), "slot")


def test_later_of_two_waiting_pushes_gets_the_slot() -> None:
    async def main(order: str) -> None:
        slots, ends = PushSlots(), dict[str, str]()
        free = anyio.Event()

        async def push(name: str) -> None:
            try:
                async with slots.hold(KEY, name):
                    if name == "first":
                        with anyio.CancelScope(shield=True):
                            await free.wait()
                    await anyio.sleep(0.1)
                ends[name] = "held on"
            except TransferInterruptedError:
                ends[name] = "gave way"

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second", "third"):
                tasks.start_soon(push, name)
                await anyio.sleep(0.1)
            free.set()
        assert ends == {"first": "gave way", "second": "gave way", "third": "held on"}, order

    for seed in range(8):  # which of two waiting tasks continues first is random
        simulate(lambda seed=seed: main(f"seed {seed}"), seed=seed)


@pytest.mark.parametrize("count", [1, 2])
async def test_slot_is_released_after_its_pushes(count: int) -> None:
    slots = PushSlots()
    for _ in range(count):
        async with slots.hold(KEY, "a file"):
            pass
    async with slots.hold(KEY, "another"):
        pass


async def test_an_open_file_is_sent_whatever_takes_its_place(tmp_path: Path) -> None:
    """Two pushes at once read it from their own positions."""
    source = tmp_path / "source"
    content = bytes(range(256)) * 20_000
    source.write_bytes(content)
    async with memory_pair() as (a, b):
        landed = accept_pushes(b, tmp_path / "landing")
        with source.open("rb", buffering=0) as file:
            source.unlink()
            source.write_bytes(b"other")
            described = await transfer.describe(file)
            async with anyio.create_task_group() as tasks:
                for name in ("first", "second"):
                    tasks.start_soon(transfer.push, a, b.peer_id, file, push_header(*described, name))
    assert [path.read_bytes() for path in landed] == [content] * 2


@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)],
    ids=["full", "quota", "I/O"],
)
async def test_a_refusal_tells_a_full_disk_from_other_errors(tmp_path: Path, number: int, is_full: bool) -> None:
    """The sender may push the same again when there is room."""
    content = b"abc" * 1000
    async with memory_pair() as (a, b):

        async def on_complete(_size: int, _digest: str) -> None:
            raise OSError(number, "cannot be stored", str(tmp_path))

        async def accept(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget:
            return transfer.FilePushTarget(tmp_path / "target", 1 << 20, on_complete)

        transfer.serve_pushes(b, accept)
        header = push_header(*await transfer.describe(content))
        with pytest.raises(TransferRefusedError, match="cannot be stored") as refused:
            await transfer.push(a, b.peer_id, content, header)
        assert refused.value.reason.startswith(NO_ROOM) is is_full


def _suspended_file(folder: Path, digest: str, received: int = 2 << 20) -> Path:
    file = partial_file.open_partial_file(folder / "target", 3 << 20, digest)
    file.append(memoryview(bytes(received)))
    file.suspend()
    return file.path


def test_suspended_files_are_limited_in_number_and_age(tmp_path: Path) -> None:
    old = _suspended_file(tmp_path, "blake3:" + "f" * 64)
    os.utime(old, (time.time() - partial_file.MAX_AGE - 60,) * 2)
    kept = []
    for number in range(partial_file.MAX_SUSPENDED + 3):
        kept.append(_suspended_file(tmp_path, f"blake3:{number:064x}"))
        os.utime(kept[-1], (time.time() - 1000 + number,) * 2)
    written = partial_file.open_partial_file(tmp_path / "target", 3 << 20, "blake3:" + "e" * 64)
    os.utime(written.path, (1, 1))  # old, but it is being written
    _suspended_file(tmp_path, "blake3:" + "d" * 64)
    assert not old.exists()
    assert written.path.exists()
    assert len(list(tmp_path.iterdir())) <= partial_file.MAX_SUSPENDED + 2
    assert kept[-1].exists()
    assert not kept[0].exists()


def test_stored_bytes_survive_the_end_of_the_process(tmp_path: Path) -> None:
    digest = "blake3:" + "a" * 64
    file = partial_file.open_partial_file(tmp_path / "target", 3 << 20, digest)
    file.append(memoryview(bytes(2 << 20)))
    file.file.close()  # as the end of the process does
    assert partial_file.resumable_bytes(tmp_path / "other", digest) == 2 << 20
    assert partial_file.open_partial_file(tmp_path / "other", 3 << 20, digest).received == 2 << 20


def test_small_partial_file_is_not_kept(tmp_path: Path) -> None:
    _suspended_file(tmp_path, "blake3:" + "a" * 64, 1000)
    assert list(tmp_path.iterdir()) == []


def test_suspended_file_uses_only_the_space_of_its_bytes(tmp_path: Path) -> None:
    file = partial_file.open_partial_file(tmp_path / "target", 64 << 20, "blake3:" + "a" * 64)
    file.append(memoryview(bytes(2 << 20)))
    assert file.path.stat().st_blocks * 512 >= 64 << 20
    file.suspend()
    assert file.path.stat().st_blocks * 512 < 4 << 20
    again = partial_file.open_partial_file(tmp_path / "target", 64 << 20, "blake3:" + "a" * 64)
    assert again.received == 2 << 20
    assert file.path.stat().st_blocks * 512 >= 64 << 20
    again.discard()


class Quota:
    """Allows files of 5 MiB in all."""

    def __init__(self) -> None:
        self.reserved: dict[Path, int] = {}

    def reserve(self, path: Path, size: int) -> None:
        if sum(self.reserved.values()) - self.reserved.get(path, 0) + size > 5 << 20:
            raise TransferRefusedError("full")
        self.reserved[path] = size

    def release(self, path: Path) -> None:
        self.reserved.pop(path, None)


def test_a_quota_is_asked_before_anything_is_allocated(tmp_path: Path) -> None:
    quota = Quota()
    first = partial_file.open_partial_file(tmp_path / "a", 3 << 20, "blake3:" + "a" * 64, quota)
    with pytest.raises(TransferRefusedError):
        partial_file.open_partial_file(tmp_path / "b", 3 << 20, "blake3:" + "b" * 64, quota)
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    first.append(memoryview(bytes(2 << 20)))
    first.suspend()
    assert quota.reserved == {}
