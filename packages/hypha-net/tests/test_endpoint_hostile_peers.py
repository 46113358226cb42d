"""Peers that violate protocols, crash, or reconnect: the endpoint drops them, logs why, and serves the others."""

from __future__ import annotations

import logging
import os
import signal
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest
import trio
from libp2p.custom_types import TProtocol
from support.endpoint_helpers import echo_at_once
from support.gateways import ECHO, LOOPBACK, Opener, open_gateway, open_node
from support.waiting import until
from support.wire_peer import expect, line

from hypha_net import retries, rpc, transfer
from hypha_net._libp2p.bootstrap import gateways
from hypha_net._libp2p.dial import upgrade
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.yamux import session
from hypha_net.endpoint import Stream
from hypha_net.errors import (
    RequestError,
    RequestTimeoutError,
    StreamResetError,
    TransferError,
    UnreachableError,
)
from hypha_net.retries import RetryPolicy
from hypha_proto.health import HEALTH_CHECK, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.protocols import HEALTH
from hypha_proto.transfer import PullRequest

Gateway = Libp2pEndpoint


def inbound_tokens(endpoint: Gateway) -> int:
    """Return how many inbound connections py-libp2p counts."""
    assert endpoint._swarm is not None
    return cast(int, endpoint._swarm._inbound_limiter.borrowed_tokens)


async def check_serves(gateway: Gateway, authority: Any) -> None:
    """Check that a well-behaved node is still served."""
    async with open_node(authority, "good", "worker") as leaf:
        assert await leaf.connect(gateway.addresses[0]) == gateway.peer_id


# ------------------------------------------------------------------------------------------------------- raw sockets


async def dial_raw(gateway: Gateway) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", int(gateway.addresses[0].split("/")[4]))


async def read_to_end(stream: Any) -> bytes:
    """Read until the other side closes or breaks the connection."""
    data = bytearray()
    try:
        while part := await stream.receive_some(65536):
            data += part
    except (trio.BrokenResourceError, ssl.SSLError):
        return bytes(data)
    return bytes(data)


async def dial_tls(gateway: Gateway, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    stream = await dial_raw(gateway)
    hello = line("/multistream/1.0.0")
    await stream.send_all(hello + line("/tls/1.0.0"))
    await expect(stream, hello + line("/tls/1.0.0"))
    secured = trio.SSLStream(stream, context, https_compatible=True)
    await secured.do_handshake()
    return secured


async def dial_yamux(gateway: Gateway, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    secured = await dial_tls(gateway, context)
    await secured.send_all(line("/multistream/1.0.0") + line("/yamux/1.0.0"))
    await expect(secured, line("/multistream/1.0.0") + line("/yamux/1.0.0"))
    return secured


@pytest.mark.parametrize(
    ("wire", "answer"),
    [
        (line("/multistream/1.0.0") + line("/noise"), line("/multistream/1.0.0") + line("na")),
        (line("/multistream/1.0.0") + line("/plaintext/2.0.0"), line("/multistream/1.0.0") + line("na")),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), None),
        (b"\xff" * 20, None),
        (line("/multistream/1.0.0") + line("/tls/1.0.0") + b"no hello of TLS" * 40, None),
        (b"", None),
    ],
    ids=["noise", "plaintext", "http", "bare tls", "length", "rubbish in tls", "silence"],
)
async def test_connection_without_mutual_tls_is_closed(
    authority: Any, monkeypatch: pytest.MonkeyPatch, wire: bytes, answer: bytes | None
) -> None:
    monkeypatch.setattr(upgrade, "UPGRADE_TIMEOUT", 0.5)
    async with open_gateway(authority) as gateway:
        stream = await dial_raw(gateway)
        if wire:
            await stream.send_all(wire)
        with anyio.fail_after(15):
            received = await read_to_end(stream)
        if answer is not None:
            assert received == answer
        assert not gateway.connected_peers()
        await until(lambda: inbound_tokens(gateway) == 0)
        monkeypatch.undo()
        await check_serves(gateway, authority)


async def test_a_peer_without_a_certificate_is_refused_with_the_reason(authority: Any, caplog: Any) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.identity("base").trust_pem)
    with caplog.at_level(logging.WARNING):
        async with open_gateway(authority) as gateway:
            secured = await dial_tls(gateway, context)
            with anyio.fail_after(15):
                await read_to_end(secured)
            await until(lambda: "showed no certificate" in caplog.text)
            assert not gateway.connected_peers()
            await until(lambda: inbound_tokens(gateway) == 0)
            await check_serves(gateway, authority)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "wire",
    [
        os.urandom(600),
        struct.pack(">BBHII", 0, 0, 1, 1, 1 << 31),
        struct.pack(">BBHII", 0, 0, 1, 1, 7)
        + b"\xff\xff\xff\xff\xff\xff\x7f",  # a stream whose first line is 2^48 long
        struct.pack(">BBHII", 0, 1, 1, 1, 0) * 2,
        struct.pack(">BBHII", 0, 0, 1, 1, 25) + line("/multistream/1.0.0") + b"\x05abcd",
        struct.pack(">BBHII", 0, 3, 0, 0, 0),
        struct.pack(">BBHII", 0, 0, 1, 1, 25) + line("/multistream/1.0.0") + b"\x04a\x80b\n",
    ],
    ids=["noise", "length", "long line", "open twice", "truncated line", "go away", "not UTF-8"],
)
async def test_malformed_input_of_a_trusted_peer_affects_only_that_peer(
    authority: Any, wire: bytes, caplog: Any
) -> None:
    async with open_gateway(authority) as gateway:
        context = authority.identity("rubbish").client_context()
        secured = await dial_yamux(gateway, context)
        await until(lambda: len(gateway.connected_peers()) == 1)
        await secured.send_all(wire)
        await check_serves(gateway, authority)
        await secured.transport_stream.aclose()
        await until(lambda: not gateway.connected_peers())
        await check_serves(gateway, authority)
        await until(lambda: inbound_tokens(gateway) == 0)
    assert "Traceback" not in caplog.text


# --------------------------------------------------------------------------------------------------------- reconnecting


async def test_more_connections_in_turn_than_the_limit_leak_no_tokens(authority: Any) -> None:
    async with (
        open_gateway(authority, max_connections=4) as gateway,
        open_node(authority, "leaf", "worker", max_connections=4) as leaf,
    ):
        gateway.handle(ECHO, echo_at_once)
        for _ in range(10):
            await leaf.connect(gateway.addresses[0])
            stream = await leaf.open_stream(gateway.peer_id, [ECHO])
            await stream.send_all(b"x")
            await stream.send_eof()
            assert await stream.receive_some() == b"x"
            await stream.aclose()
            await leaf.disconnect(gateway.peer_id)
        await until(lambda: inbound_tokens(gateway) == 0)
        await check_serves(gateway, authority)


async def test_reconnects_to_a_gateway_that_drops_peers_back_off(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, int]] = []

    def pause(pauses: tuple[float, ...], failures: int) -> float:
        asked.append((pauses, failures))
        return 0.0

    monkeypatch.setattr(gateways, "jittered", pause)
    async with open_gateway(authority) as gateway, open_node(authority, "leaf", "worker", gateway=gateway):
        while len(asked) < 5:
            for peer in gateway.connected_peers():
                await gateway.disconnect(peer)
            await anyio.sleep(0.01)
    assert asked[:5] == [(gateways.BACKOFF, failures) for failures in range(5)]


async def stable_count(count: Callable[[], int]) -> int:
    """Return a count once it has been the same for half a second."""
    with anyio.fail_after(15):
        while True:
            before = count()
            with anyio.move_on_after(0.5):
                await until(lambda before=before: count() != before)  # type: ignore[misc]
            if count() == before:
                return before


async def test_failed_requests_leave_no_stream_open(libp2p_opener: Opener) -> None:
    async with libp2p_opener(2) as nodes:
        gateway, leaf = cast(list[Gateway], nodes)

        async def never(_stream: Stream) -> None:
            await anyio.sleep_forever()

        async def wrong(stream: Stream) -> None:
            await stream.send_all(b"\xff")

        def open_streams() -> int:
            pair = ((gateway, leaf.peer_id), (leaf, gateway.peer_id))
            found = [node._dialer.connection(peer) for node, peer in pair]
            return sum(len(cast(Any, connection).muxed_conn._streams) for connection in found)

        before = await stable_count(open_streams)
        gateway.handle(HEALTH, never)
        for _ in range(20):
            with pytest.raises(RequestTimeoutError):
                await rpc.call(leaf, gateway.peer_id, HEALTH_CHECK, HealthRequest(), timeout=0.02)
        gateway.handle(HEALTH, wrong)
        for _ in range(20):
            with pytest.raises(RequestError):
                await rpc.call(leaf, gateway.peer_id, HEALTH_CHECK, HealthRequest())
        gateway._host.remove_stream_handler(TProtocol(HEALTH))
        for _ in range(20):
            with pytest.raises(Exception, match="speaks none of"):
                await rpc.call(leaf, gateway.peer_id, HEALTH_CHECK, HealthRequest())
        await until(lambda: open_streams() <= before)


# ------------------------------------------------------------------------------------------------------------ crashes

CHILD = """
import sys
from pathlib import Path
import anyio
from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_net.identity import load_identity

async def main(cert, key, trust, gateway, slices):
    identity = load_identity(Path(cert), Path(key), Path(trust))
    settings = EndpointSettings(listen_addresses=("/ip4/127.0.0.1/tcp/0",), gateway_addresses=(gateway,))
    async with open_endpoint(identity, settings) as node:
        async def resolve(peer, request):
            return transfer.PullSource(Path(slices), "blake3:" + "0" * 64)
        transfer.serve_pulls(node, resolve)
        await node.wait_for_gateway()
        (peer,) = node.connected_peers()
        stream = await node.open_stream(peer, ["/test/echo/1"])
        await stream.send_all(b"here")
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:], backend="trio")
"""


@asynccontextmanager
async def child_node(authority: Any, gateway: Gateway, slices: Path) -> AsyncIterator[tuple[int, PeerId]]:
    """Run a node in its own process; yield its pid and peer id."""
    identity = authority.identity("child", "worker")
    files = [str(path) for path in (identity.cert_pem, identity.cert_pem.with_name("child-key.pem"))]
    arguments = [*files, str(identity.trust_pem), gateway.addresses[0], str(slices)]
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments])
    try:
        yield process.pid, identity.peer_id
    finally:
        process.kill()
        process.wait()


async def test_killed_peer_is_detected_at_once_and_its_transfer_fails(
    authority: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.1,)))
    monkeypatch.setattr(session, "PING_INTERVAL", 3600.0)  # it is not the next ping that detects it
    slices = tmp_path / "slices" / "large"
    slices.parent.mkdir()
    with slices.open("wb") as file:
        file.truncate(1 << 30)
    target = tmp_path / "landing" / "target"
    target.parent.mkdir()
    ends: list[str] = []
    opened = anyio.Event()

    async def hold(stream: Stream) -> None:
        assert await stream.receive_some() == b"here"
        opened.set()
        try:
            ends.append(repr(await stream.receive_some()))
        except StreamResetError:
            ends.append("reset")

    async with open_node(authority, "worker", "worker", listen_addresses=(LOOPBACK,)) as gateway:
        gateway.handle(ECHO, hold)
        async with child_node(authority, gateway, slices) as (pid, peer):
            await opened.wait()
            failures: list[TransferError] = []

            async def pull() -> None:
                with pytest.raises(TransferError, match="broke off") as caught:
                    await transfer.pull(gateway, peer, PullRequest(dataset="d", index=0), target)
                failures.append(caught.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pull)
                await until(lambda: gateway.traffic.received > 4 << 20)
                os.kill(pid, signal.SIGKILL)
                await until(lambda: bool(ends) and peer not in gateway.connected_peers(), 60)
                await until(lambda: bool(failures), 60)
            with pytest.raises(UnreachableError):
                await gateway.open_stream(peer, [ECHO], timeout=5)
        assert ends == ["reset"]
        assert not target.exists()  # a partial file has another name
        await until(lambda: inbound_tokens(gateway) == 0)
