"""Peers that violate protocols, crash, or reconnect: the endpoint drops them, logs why, and serves the others."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.endpoint_helpers import echo_at_once, publish_until_heard
from support.process_ready import first_line
from support.waiting import run, until
from support.wire_peer import expect, line

from hypha_net import EndpointSettings, open_endpoint, rpc, transfer
from hypha_net._libp2p.bootstrap import gateways
from hypha_net._libp2p.dial import upgrade
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.yamux import session
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import (
    RefusedError,
    RequestError,
    RequestTimeoutError,
    StreamResetError,
    TransferError,
    UnreachableError,
)
from hypha_net.identity import load_identity
from hypha_net.transfer import retry
from hypha_proto.health import HEALTH_CHECK, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.protocols import HEALTH, PULL
from hypha_proto.transfer import PullRequest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO = "/test/echo/1"
Opener = Callable[[int], AbstractAsyncContextManager[list[Endpoint]]]
Gateway = Libp2pEndpoint


@asynccontextmanager
async def open_gateway(authority: Any, **changes: Any) -> AsyncIterator[Gateway]:
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway", relay_circuit=False, **changes)
    async with open_endpoint(authority.identity("gateway"), settings) as gateway:
        yield gateway


def inbound_tokens(endpoint: Gateway) -> int:
    """Return how many inbound connections py-libp2p counts."""
    assert endpoint._swarm is not None
    return cast(int, endpoint._swarm._inbound_limiter.borrowed_tokens)


async def check_serves(gateway: Gateway, authority: Any) -> None:
    """Check that a well-behaved node is still served."""
    async with open_endpoint(authority.identity("good", "worker"), EndpointSettings()) as leaf:
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


def issue_ecdsa(authority: Any, folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a client whose certificate has an ECDSA key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ecdsa")]))
        .issuer_name(authority.org.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .sign(authority.org.key, None)
    )
    path = folder / "ecdsa.pem"
    path.write_bytes(
        certificate.public_bytes(ser.Encoding.PEM)
        + authority.org.pem()
        + key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    )
    assert isinstance(certificate.signature_hash_algorithm, hashes.HashAlgorithm | None)
    context = cast(ssl.SSLContext, authority.identity("base").client_context())
    context.load_cert_chain(path)
    return context


def expired(authority: Any, _folder: Path) -> ssl.SSLContext:
    day = dt.timedelta(days=1)
    cert, key, _trust = authority.files("expired", valid=(-3 * day, -day))
    context = cast(ssl.SSLContext, authority.identity("base").client_context())
    context.load_cert_chain(cert, key)
    return context


def without_certificate(authority: Any, _folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.identity("base").trust_pem)
    return context


@pytest.mark.parametrize(
    ("make", "reason"),
    [(expired, "has expired: its owner"), (issue_ecdsa, "Ed25519"), (without_certificate, "showed no certificate")],
    ids=["expired", "ecdsa", "no certificate"],
)
async def test_bad_certificates_are_refused_with_the_reason(
    authority: Any, tmp_path: Path, make: Callable[[Any, Path], ssl.SSLContext], reason: str, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_gateway(authority) as gateway:
            secured = await dial_tls(gateway, make(authority, tmp_path))
            with anyio.fail_after(15):
                await read_to_end(secured)
            await until(lambda: reason in caplog.text)
            assert not gateway.connected_peers()
            await until(lambda: inbound_tokens(gateway) == 0)
            await check_serves(gateway, authority)
    assert "Traceback" not in caplog.text


async def test_both_sides_of_different_authorities_name_the_remedy(
    authority: Any, foreign_authority: Any, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        cert, key, trust = foreign_authority.files("stranger")
        trust.write_bytes(trust.read_bytes() + authority.org.pem() + authority.root.pem())
        async with (
            open_gateway(authority) as gateway,
            open_endpoint(load_identity(cert, key, trust), EndpointSettings()) as stranger,
        ):
            with pytest.raises(RefusedError, match="compare trust_pem of both nodes"):
                await stranger.connect(gateway.addresses[0])
            await until(lambda: "is refused here" in caplog.text)
    assert "compare trust_pem of both nodes" in caplog.text


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


async def connect_repeatedly(authority: Any, times: int) -> None:
    async with (
        open_gateway(authority, max_connections=8) as gateway,
        open_endpoint(authority.identity("leaf", "worker"), EndpointSettings(max_connections=8)) as leaf,
    ):
        gateway.handle(ECHO, echo_at_once)
        for _ in range(times):
            await leaf.connect(gateway.addresses[0])
            stream = await leaf.open_stream(gateway.peer_id, [ECHO])
            await stream.send_all(b"x")
            await stream.send_eof()
            assert await stream.receive_some() == b"x"
            await stream.aclose()
            await leaf.disconnect(gateway.peer_id)
        await until(lambda: inbound_tokens(gateway) == 0)
        await check_serves(gateway, authority)


@pytest.mark.nightly
def test_hundred_connections_in_turn_leak_no_tokens(authority: Any) -> None:
    run(lambda: connect_repeatedly(authority, 100), 60)


async def test_reconnects_to_a_gateway_that_drops_peers_back_off(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, int]] = []

    def pause(pauses: tuple[float, ...], failures: int) -> float:
        asked.append((pauses, failures))
        return 0.0

    monkeypatch.setattr(gateways, "jittered", pause)
    async with open_gateway(authority) as gateway:
        settings = EndpointSettings(gateway_addresses=(gateway.addresses[0],))
        async with open_endpoint(authority.identity("leaf", "worker"), settings):
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
        gateway.unhandle(HEALTH)
        for _ in range(20):
            with pytest.raises(Exception, match="speaks none of"):
                await rpc.call(leaf, gateway.peer_id, HEALTH_CHECK, HealthRequest())
        await until(lambda: open_streams() <= before)


async def test_header_with_excessive_length_resets_the_stream(libp2p_opener: Opener) -> None:
    async with libp2p_opener(2) as (gateway, leaf):

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            raise AssertionError("a hostile header must not get here")

        transfer.serve_pulls(gateway, resolve)
        stream = await leaf.open_stream(gateway.peer_id, [PULL])
        await stream.send_all((1 << 62).to_bytes(8, "little") + bytes(1000))
        with anyio.fail_after(15), pytest.raises(StreamResetError):
            await stream.receive_some()
        await stream.aclose()


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
    monkeypatch.setattr(retry, "PAUSES", (0.1,))
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

    async with open_gateway(authority) as gateway:
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


GATEWAY = """
import sys
from pathlib import Path
import anyio
from hypha_net import EndpointSettings, open_endpoint
from hypha_net.identity import load_identity

async def main(cert, key, trust, listen, state):
    identity = load_identity(Path(cert), Path(key), Path(trust))
    settings = EndpointSettings(listen_addresses=(listen,), role="gateway", state_dir=Path(state))
    async with open_endpoint(identity, settings) as gateway, gateway.subscribe("t"):
        print(gateway.addresses[0], flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:], backend="trio")
"""


def start_gateway(files: tuple[Path, ...], listen: str, state: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a gateway in its own process; return the process and its address."""
    command = [sys.executable, "-c", GATEWAY, *map(str, files), listen, str(state)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, first_line(process)


@pytest.mark.nightly
async def test_nodes_recover_after_their_gateway_was_killed_and_restarted(authority: Any, tmp_path: Path) -> None:
    files = authority.files("gateway", "gateway")
    state = tmp_path / "state"
    state.mkdir()
    process, address = await anyio.to_thread.run_sync(start_gateway, files, LOOPBACK, state)
    settings = EndpointSettings(gateway_addresses=(address,))
    try:
        async with (
            open_endpoint(authority.identity("one", "data"), settings) as one,
            open_endpoint(authority.identity("two", "worker"), settings) as two,
            one.subscribe("t"),
            two.subscribe("t") as heard,
        ):
            for node in (one, two):
                await node.wait_for_gateway(10)
            await one.put_record(b"digits", b"{}")
            process.kill()
            await until(lambda: not one.connected_peers() and not two.connected_peers())
            with pytest.raises(UnreachableError):
                await two.find_records(b"digits")
            process.wait()
            process, _ = await anyio.to_thread.run_sync(start_gateway, files, address.split("/p2p/")[0], state)
            await until(lambda: bool(one.topic_peers("t") and two.topic_peers("t")), 20)
            (record,) = await two.find_records(b"digits")
            assert record.publisher == one.peer_id
            await until(lambda: bool(one.addresses and two.addresses))  # they have reservations again
            two.handle(ECHO, echo_at_once)
            await (await one.open_stream(two.peer_id, [ECHO])).aclose()
            await publish_until_heard(one, "t", b"as before", heard)
    finally:
        process.kill()
        process.wait()
