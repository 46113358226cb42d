"""Requests, gossip, directory and transfer, over the network in memory (the contract tests hold it to the real one)."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hypha_net import dataset_directory, pubsub, rpc, transfer
from hypha_net.endpoint import Stream
from hypha_net.errors import (
    RequestError,
    RequestTimeoutError,
    TransferError,
    TransferRefusedError,
    UnsupportedProtocolError,
)
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.datasets import DatasetRecord
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, RenewalFailed, RenewLease
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerRequest, WorkerSpec
from hypha_proto.protocols import API, HEALTH, PULL, PULL_WITH_HEADER, PUSH_WITH_HEADER
from hypha_proto.resources import Resources, Timestamp
from hypha_proto.transfer import PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal

Case = Callable[[MemoryEndpoint, MemoryEndpoint], Awaitable[None]]


def run(case: Case) -> None:
    async def main() -> None:
        network = MemoryNetwork(seed=3)
        with anyio.fail_after(20):
            async with network.endpoint("a") as a, network.endpoint("b") as b:
                await case(a, b)

    anyio.run(main, backend="trio")


async def _healthy(_peer: PeerId, _request: HealthRequest) -> Health:
    return Health(healthy=True)


def test_a_request_is_answered() -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        rpc.serve(b, HEALTH_CHECK, _healthy)
        assert await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest()) == Health(healthy=True)

    run(case)


def test_methods_share_a_protocol_and_receive_the_peer_id() -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        asked: list[tuple[PeerId, uuid.UUID]] = []

        async def renew(peer: PeerId, request: RenewLease) -> LeaseRenewal:
            asked.append((peer, request.id))
            return RenewalFailed()

        rpc.serve(b, RENEW_LEASE, renew)
        lease = uuid.UUID(int=7)
        assert isinstance(await rpc.call(a, b.peer_id, RENEW_LEASE, RenewLease(id=lease)), RenewalFailed)
        assert asked == [(a.peer_id, lease)]
        assert OFFER.protocol == API  # served protocol, but nobody answers this conversation
        with pytest.raises(RequestError):
            await rpc.call(a, b.peer_id, OFFER, _offer())

    run(case)


def _offer() -> object:
    from hypha_proto.offers import WorkerOffer

    one = uuid.UUID(int=1)
    return WorkerOffer(id=one, request_id=one, price=1.0, resources=Resources(), timeout=Timestamp.of(0))


def test_a_failing_handler_is_an_error_for_the_client() -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async def fail(_peer: PeerId, _request: HealthRequest) -> Health:
            raise RuntimeError("broken")

        rpc.serve(b, HEALTH_CHECK, fail)
        with pytest.raises(RequestError, match="health"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())

    run(case)


def test_a_silent_peer_times_out() -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async def silent(_stream: Stream) -> None:
            await anyio.sleep_forever()

        b.handle(HEALTH, silent)
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest(), timeout=0.05)

    run(case)


@pytest.mark.parametrize("answer", [b"", b"\xa0\xa0", b"\xff", b"\xa1gheal"])
def test_a_malformed_answer_is_an_error(answer: bytes) -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async def liar(stream: Stream) -> None:
            await stream.send_all(answer) if answer else None
            await stream.send_eof()

        b.handle(HEALTH, liar)
        with pytest.raises(RequestError, match="malformed"):
            await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())

    run(case)


def test_typed_gossip_drops_undecodable_messages() -> None:
    spec = WorkerSpec(resources=Resources(cpu=1.0), executor=())
    said = WorkerRequest(id=uuid.UUID(int=5), spec=spec, timeout=Timestamp.of(1.5), bid=2.0)

    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async with pubsub.subscribe(b, WORKER_REQUESTS) as messages:
            await a.publish(WORKER_REQUESTS.name, b"rubbish")
            await pubsub.publish(a, WORKER_REQUESTS, said)
            assert await anext(messages) == (a.peer_id, said)

    run(case)


def test_datasets_are_found_by_name_with_their_provider() -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        await dataset_directory.announce_dataset(a, "digits", DatasetRecord(num_slices=4))
        await b.put_record(b"digits", b"not json")
        [found] = await dataset_directory.find_dataset(b, "digits")
        assert (found.provider, found.record.num_slices) == (a.peer_id, 4)
        assert await dataset_directory.find_dataset(b, "unknown") == []

    run(case)


def _header(path: Path, size: int, digest: str) -> PushHeader:
    return PushHeader(job_id=uuid.UUID(int=1), round=1, kind=PSEUDO_GRADIENT, name=path.name, size=size, digest=digest)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 3_333_333])
@pytest.mark.parametrize("old", [False, True], ids=["header", "old wire"])
def test_a_push_is_received_complete(tmp_path: Path, size: int, old: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))

    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        arrived = anyio.Event()
        headers: list[PushHeader | None] = []

        async def landed(_size: int, _digest: str) -> None:
            arrived.set()

        async def accept(_peer: PeerId, header: PushHeader | None) -> transfer.FilePushTarget:
            headers.append(header)
            return transfer.FilePushTarget(target, 1 << 24, landed)

        transfer.serve_pushes(b, accept)
        if old:
            b.unhandle(PUSH_WITH_HEADER)
        header = _header(source, *await transfer.describe(source))
        assert await transfer.push(a, b.peer_id, source, header) == size
        await arrived.wait()
        assert headers == [None if old else header]

    run(case)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def test_refused_and_corrupt_pushes_leave_no_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"abc" * 1000)

    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        answer: list[transfer.FilePushTarget | Refusal] = [Refusal(reason="not your round")]

        async def landed(_size: int, _digest: str) -> None:
            raise AssertionError("a corrupt file must not arrive")

        async def accept(_peer: PeerId, _header: PushHeader | None) -> transfer.FilePushTarget | Refusal:
            return answer[0]

        transfer.serve_pushes(b, accept)
        size, digest = await transfer.describe(source)
        with pytest.raises(TransferRefusedError, match="not your round"):
            await transfer.push(a, b.peer_id, source, _header(source, size, digest))
        answer[0] = transfer.FilePushTarget(tmp_path / "target", 100, landed)
        with pytest.raises(TransferRefusedError, match="over the limit of 100"):
            await transfer.push(a, b.peer_id, source, _header(source, size, digest))
        answer[0] = transfer.FilePushTarget(tmp_path / "target", 1 << 20, landed)
        with pytest.raises(TransferRefusedError, match="digest"):
            await transfer.push(a, b.peer_id, source, _header(source, size, "blake3:" + "0" * 64))

    run(case)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("old", [False, True], ids=["header", "old wire"])
def test_a_pull_receives_the_file(tmp_path: Path, old: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"slice" * 500_000)

    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            return transfer.PullSource(source) if request.index == 2 else Refusal(reason=f"no slice {request.index}")

        transfer.serve_pulls(b, resolve)
        if old:
            b.unhandle(PULL_WITH_HEADER)
        _, digest = await transfer.describe(source)
        pulled = await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), target, digest=digest)
        assert (pulled.size, pulled.digest) == (2_500_000, digest)
        with pytest.raises(TransferError):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=3), tmp_path / "none")
        with pytest.raises(TransferError):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "none", max_bytes=1000)
        with pytest.raises(TransferError):
            await transfer.pull(
                a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "none", digest="blake3:" + "0" * 64
            )

    run(case)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]
    assert target.read_bytes() == source.read_bytes()


def test_an_interrupted_pull_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    async def case(a: MemoryEndpoint, b: MemoryEndpoint) -> None:
        async def cut(stream: Stream) -> None:
            await stream.send_all(b"half of a slice")
            await anyio.sleep(0.01)
            await stream.reset()

        b.handle(PULL, cut)
        with pytest.raises(TransferError, match="broke off"):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "target")
        with pytest.raises(UnsupportedProtocolError):
            await transfer.push(a, b.peer_id, tmp_path / "x", _header(tmp_path / "x", 0, "blake3:" + "0" * 64))

    run(case)
    assert list(tmp_path.iterdir()) == []
