"""Each fault of py-libp2p 0.8.1 that docs/libp2p.md lists by number: py-libp2p has it, our engine does not.

A row is one scenario, run by both engines. When an upgrade fixes a fault, py-libp2p passes its row, the test fails, and
the workaround can be removed.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr
from support import engine_comparison
from support.engine_comparison import BrokenError, Engine, Node, Ours, Pipe, Stock, echo, read_all
from support.loopback_ports import free_port
from support.process_ready import first_line
from support.waiting import run

from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.errors import NetError, leaf_errors

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def node_process(engine: Engine, folder: Path, handler: str) -> AsyncIterator[tuple[str, subprocess.Popen[str]]]:
    """Run a node in its own process; yield its address and the process."""
    program = Path(engine_comparison.__file__)
    command = [sys.executable, str(program), engine.name, str(folder), handler]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield await anyio.to_thread.run_sync(first_line, process), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


async def request_echo(node: Node, address: str, seconds: float = 3) -> None:
    """Check that an echo is answered."""
    with within(seconds, f"no echo within {seconds} s"):
        pipe = await node.open(address)
        await pipe.write(b"hello")
        await pipe.end()
        assert await read_all(pipe) == b"hello"


@contextmanager
def within(seconds: float, otherwise: str) -> Iterator[None]:
    """Fail with the message `otherwise` when the body takes longer."""
    with anyio.move_on_after(seconds):
        yield
        return
    raise AssertionError(otherwise)


# ----------------------------------------------------------------------------------------------------------- the rows

Row = Callable[[Engine, Path], Awaitable[None]]


async def more_connections_in_turn_than_the_limit(engine: Engine, _folder: Path) -> None:
    """1: a node accepts more connections, one after the other, than it may have at once."""
    async with engine.node("server", max_connections=8) as server, engine.node("client", listen=None) as client:
        server.serve(echo)
        for _ in range(20):
            with anyio.fail_after(15):
                await client.reach(server.address)
            await request_echo(client, server.address)
            await client.leave(server.address)


async def killed_writer_is_not_a_clean_end(engine: Engine, folder: Path) -> None:
    """2: a stream whose writer is killed does not end cleanly."""
    async with node_process(engine, folder, "die") as (address, _), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        await pipe.write(b"go")
        try:
            data = await read_all(pipe)
        except BrokenError:
            return
        raise AssertionError(f"{len(data)} bytes look like all of it")


async def writer_waits_for_its_reader(engine: Engine, folder: Path) -> None:
    """3: a write continues when the peer reads again after half a minute."""
    async with node_process(engine, folder, "late") as (address, _), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        try:
            await pipe.write(bytes(16 << 20))
        except BrokenError as error:
            raise AssertionError("the write failed while nobody read") from error
        await pipe.end()
        with within(20, "no answer"):
            assert await read_all(pipe) == str(16 << 20).encode()


async def cancelled_writes_leave_the_connection_intact(engine: Engine, folder: Path) -> None:
    """4: writes that are cancelled while the connection is blocked leave it intact."""
    async with node_process(engine, folder, "hold") as (address, process), engine.node("client", listen=None) as client:
        await client.reach(address)
        await request_echo(client, address)
        pipes = [await client.open(address) for _ in range(60)]
        process.send_signal(signal.SIGSTOP)

        async def write(pipe: Pipe) -> None:
            await pipe.write(b"hold" + bytes(250_000))

        async def go_on() -> None:
            await anyio.sleep(3)
            process.send_signal(signal.SIGCONT)

        async with anyio.create_task_group() as outer:
            outer.start_soon(go_on)
            with anyio.move_on_after(2):
                async with anyio.create_task_group() as tasks:
                    for pipe in pipes:
                        tasks.start_soon(write, pipe)
                    await anyio.sleep_forever()
        await request_echo(client, address, 10)


async def stopped_peer_is_detected(engine: Engine, folder: Path) -> None:
    """5: a read from a stopped process fails within 35 s."""
    async with node_process(engine, folder, "echo") as (address, process), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        process.send_signal(signal.SIGSTOP)
        with within(45, "nothing noticed within 45 s"), pytest.raises(BrokenError):
            await pipe.read()


async def three_hundred_concurrent_streams(engine: Engine, _folder: Path) -> None:
    """6: a connection carries more than 256 streams."""
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        server.serve(echo)
        await client.reach(server.address)
        pipes: list[Pipe] = []
        for number in range(300):
            with within(5, f"stream {number} hangs"):
                pipes.append(await client.open(server.address))
        for pipe in pipes:
            with within(5, "no answer"):
                await pipe.end()
                assert await read_all(pipe) == b""


async def plain_text_is_refused(engine: Engine, _folder: Path) -> None:
    """7: a node refuses a peer that offers no encryption."""
    keys = create_new_key_pair(bytes(31) + b"\1")
    plain = new_host(key_pair=keys, sec_opt={TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(keys)})
    async with engine.node("server") as server, plain.run([]):
        with trio.move_on_after(5), suppress(SwarmException):
            await plain.connect(info_from_p2p_addr(Multiaddr(server.address)))
        assert not plain.get_connected_peers(), "a peer without encryption was accepted"


async def second_address_is_tried(engine: Engine, _folder: Path) -> None:
    """8: a peer is reached although its first address is dead."""
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        server.serve(echo)
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{server.address.rsplit('/', 1)[1]}"
        await client.reach(dead, server.address)
        await request_echo(client, server.address)


async def auto_connector_dials_no_peer(engine: Engine, _folder: Path) -> None:
    """9: the auto-connector does not dial a peer just because its address is known."""
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        client.know(server.address)
        await client.swarm.auto_connector.maybe_connect()
        await anyio.sleep(1)
        assert not client.swarm.connections, f"dialled {list(client.swarm.connections)}"


async def port_is_not_shared(engine: Engine, _folder: Path) -> None:
    """10: a second node cannot listen on the port of the first."""
    async with engine.node("server") as server:
        listen = server.address.split("/p2p/")[0]
        second = None
        with suppress(NetError):
            async with engine.node("client", listen=listen) as node:
                second = node.address
        assert second is None, f"two nodes listen at {second}"


async def connecting_does_not_sleep(engine: Engine, _folder: Path) -> None:
    """11: the fastest of five connects takes less than the quarter of a second that py-libp2p sleeps."""
    took = []
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        for _ in range(5):
            begun = anyio.current_time()
            await client.reach(server.address)
            took.append(anyio.current_time() - begun)
            await client.leave(server.address)
    assert min(took) < 0.25, took


async def configured_muxer_is_used(engine: Engine, _folder: Path) -> None:
    """12: connections use the muxer that the host was given for yamux."""

    class Chosen(Yamux):
        pass

    if engine.name == "ours":
        async with engine.node("server") as server, engine.node("client", listen=None) as client:
            await client.reach(server.address)
            assert _muxers(client.swarm) == {YamuxSession}
        return
    options: Any = {TProtocol("/yamux/1.0.0"): Chosen}
    host = new_host(key_pair=create_new_key_pair(bytes(31) + b"\2"), muxer_opt=options)
    async with engine.node("server") as server, host.run([]):
        await host.connect(info_from_p2p_addr(Multiaddr(server.address)))
        assert _muxers(host.get_network()) == {Chosen}


def _muxers(swarm: Any) -> set[type]:
    return {type(connection.muxed_conn) for some in swarm.connections.values() for connection in some}


ROWS: dict[Row, str] = {
    more_connections_in_turn_than_the_limit: "no addresses established",
    killed_writer_is_not_a_clean_end: "bytes look like all of it",
    writer_waits_for_its_reader: "the write failed while nobody read",
    cancelled_writes_leave_the_connection_intact: "no echo within 10 s",
    stopped_peer_is_detected: "nothing noticed within 45 s",
    three_hundred_concurrent_streams: r"stream 2\d\d hangs",
    plain_text_is_refused: "a peer without encryption was accepted",
    second_address_is_tried: "no addresses established",
    auto_connector_dials_no_peer: "AssertionError: dialled",
    port_is_not_shared: "two nodes listen at",
    connecting_does_not_sleep: r"AssertionError: \[0\.2[5-9]",
    configured_muxer_is_used: r"yamux\.Yamux",
}
"""The symptom of each row under py-libp2p."""


def play(row: Row, engine: Engine, folder: Path) -> None:
    async def main() -> None:
        await row(engine, folder)

    run(main, 80)


@pytest.mark.nightly
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_our_engine_is_free_of_the_fault(row: Row, authority: Any) -> None:
    authority.files("server")
    play(row, Ours(authority.files), authority.folder)


@pytest.mark.upstream
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_py_libp2p_has_the_fault(row: Row, tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what it says is compared below
        play(row, Stock(), tmp_path)
    errors = [f"{type(leaf).__name__}: {leaf}" for leaf in leaf_errors(raised.value)]
    assert any(re.search(ROWS[row], one) for one in errors), errors
