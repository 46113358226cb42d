"""Every fault of py-libp2p 0.8.1 that docs/libp2p.md lists by number: the stock engine shows it, ours does not.

A row is one scenario, played by both engines. When an upgrade cures a fault, the stock engine passes its row, this file
says so, and the cure can go.
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
from hypha_net.error_causes import leaf_errors
from hypha_net.errors import NetError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@asynccontextmanager
async def apart(engine: Engine, folder: Path, handler: str) -> AsyncIterator[tuple[str, subprocess.Popen[str]]]:
    """A node in a process of its own: its address, and the process."""
    program = Path(engine_comparison.__file__)
    command = [sys.executable, str(program), engine.name, str(folder), handler]
    process = subprocess.Popen(  # noqa: ASYNC220 - it is started before anything else runs
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield await anyio.to_thread.run_sync(first_line, process), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


async def ask(node: Node, address: str, seconds: float = 3) -> None:
    """An echo that comes back."""
    with within(seconds, f"no echo within {seconds} s"):
        pipe = await node.open(address)
        await pipe.write(b"hello")
        await pipe.end()
        assert await read_all(pipe) == b"hello"


@contextmanager
def within(seconds: float, otherwise: str) -> Iterator[None]:
    """Fail with these words when it takes longer."""
    with anyio.move_on_after(seconds):
        yield
        return
    raise AssertionError(otherwise)


# ----------------------------------------------------------------------------------------------------------- the rows

Row = Callable[[Engine, Path], Awaitable[None]]


async def many_connections_in_turn(engine: Engine, _folder: Path) -> None:
    """1: a node accepts more connections, one after the other, than it may have at once."""
    async with engine.node("server", max_connections=8) as server, engine.node("client", listen=None) as client:
        server.serve(echo)
        for _ in range(20):
            with anyio.fail_after(15):
                await client.reach(server.address)
            await ask(client, server.address)
            await client.leave(server.address)


async def a_killed_peer_s_stream_is_not_whole(engine: Engine, folder: Path) -> None:
    """2: a stream whose writer is killed does not end cleanly."""
    async with apart(engine, folder, "die") as (address, _), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        await pipe.write(b"go")
        try:
            data = await read_all(pipe)
        except BrokenError:
            return
        raise AssertionError(f"{len(data)} bytes look like all of it")


async def a_writer_waits_for_its_reader(engine: Engine, folder: Path) -> None:
    """3: a write goes on when the peer reads again after half a minute."""
    async with apart(engine, folder, "late") as (address, _), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        try:
            await pipe.write(bytes(16 << 20))
        except BrokenError as error:
            raise AssertionError("the write failed while nobody read") from error
        await pipe.end()
        with within(20, "no answer"):
            assert await read_all(pipe) == str(16 << 20).encode()


async def a_cancelled_write_harms_nothing_else(engine: Engine, folder: Path) -> None:
    """4: writes that are cancelled while the connection takes nothing leave it in order."""
    async with apart(engine, folder, "hold") as (address, process), engine.node("client", listen=None) as client:
        await client.reach(address)
        await ask(client, address)
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
        await ask(client, address, 10)


async def a_stopped_peer_is_noticed(engine: Engine, folder: Path) -> None:
    """5: a read from a process that was stopped fails within 35 s."""
    async with apart(engine, folder, "echo") as (address, process), engine.node("client", listen=None) as client:
        await client.reach(address)
        pipe = await client.open(address)
        process.send_signal(signal.SIGSTOP)
        with within(45, "nothing noticed within 45 s"), pytest.raises(BrokenError):
            await pipe.read()


async def three_hundred_streams_at_once(engine: Engine, _folder: Path) -> None:
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


async def nobody_talks_in_plain_text(engine: Engine, _folder: Path) -> None:
    """7: a node refuses a peer that offers no encryption."""
    keys = create_new_key_pair(bytes(31) + b"\1")
    plain = new_host(key_pair=keys, sec_opt={TProtocol(PLAINTEXT_PROTOCOL_ID): InsecureTransport(keys)})
    async with engine.node("server") as server, plain.run([]):
        with trio.move_on_after(5), suppress(SwarmException):
            await plain.connect(info_from_p2p_addr(Multiaddr(server.address)))
        assert not plain.get_connected_peers(), "a peer without encryption was let in"


async def the_second_address_is_tried(engine: Engine, _folder: Path) -> None:
    """8: a peer is reached although its first address is dead."""
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        server.serve(echo)
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{server.address.rsplit('/', 1)[1]}"
        await client.reach(dead, server.address)
        await ask(client, server.address)


async def nobody_is_dialled_unasked(engine: Engine, _folder: Path) -> None:
    """9: the automatic connector dials nobody just because an address is known."""
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        client.know(server.address)
        await client.swarm.auto_connector.maybe_connect()
        await anyio.sleep(1)
        assert not client.swarm.connections, f"dialled {list(client.swarm.connections)}"


async def a_port_belongs_to_one(engine: Engine, _folder: Path) -> None:
    """10: a second node cannot listen where the first does."""
    async with engine.node("server") as server:
        listen = server.address.split("/p2p/")[0]
        second = None
        with suppress(NetError):
            async with engine.node("client", listen=listen) as node:
                second = node.address
        assert second is None, f"two nodes listen at {second}"


async def connecting_takes_no_pause(engine: Engine, _folder: Path) -> None:
    """11: the fastest of five connects takes less than the quarter of a second that stock sleeps."""
    took = []
    async with engine.node("server") as server, engine.node("client", listen=None) as client:
        for _ in range(5):
            begun = anyio.current_time()
            await client.reach(server.address)
            took.append(anyio.current_time() - begun)
            await client.leave(server.address)
    assert min(took) < 0.25, took


async def the_chosen_muxer_runs(engine: Engine, _folder: Path) -> None:
    """12: connections are made by the muxer that the host was given for yamux."""

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
    many_connections_in_turn: "no addresses established",
    a_killed_peer_s_stream_is_not_whole: "bytes look like all of it",
    a_writer_waits_for_its_reader: "the write failed while nobody read",
    a_cancelled_write_harms_nothing_else: "no echo within 10 s",
    a_stopped_peer_is_noticed: "nothing noticed within 45 s",
    three_hundred_streams_at_once: r"stream 2\d\d hangs",
    nobody_talks_in_plain_text: "a peer without encryption was let in",
    the_second_address_is_tried: "no addresses established",
    nobody_is_dialled_unasked: "AssertionError: dialled",
    a_port_belongs_to_one: "two nodes listen at",
    connecting_takes_no_pause: r"AssertionError: \[0\.2[5-9]",
    the_chosen_muxer_runs: r"yamux\.Yamux",
}
"""What each row looks like under the stock engine."""


def play(row: Row, engine: Engine, folder: Path) -> None:
    async def main() -> None:
        await row(engine, folder)

    run(main, 80)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_ours_does_not_have_it(row: Row, authority: Any) -> None:
    authority.files("server")
    play(row, Ours(authority.files), authority.folder)


@pytest.mark.parametrize(("row", "symptom"), ROWS.items(), ids=lambda row: getattr(row, "__name__", ""))
def test_stock_has_it(row: Row, symptom: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what it says is compared below
        play(row, Stock(), tmp_path)
    told = [f"{type(leaf).__name__}: {leaf}" for leaf in leaf_errors(raised.value)]
    assert any(re.search(symptom, one) for one in told), told
