"""Connections between processes: suspended, killed and restarted peers, and a thousand connections in sequence."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
import trio
from support.endpoint_helpers import next_event
from support.gateways import ECHO, LOOPBACK
from support.process_ready import first_line
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.endpoint import Stream
from hypha_net.events import Disconnected
from hypha_proto.ids import PeerId

STATE = "/test/state/1"
SILENT = 35.0
"""Seconds within which a silent peer must be detected."""
KILLED = 1.0
"""Seconds within which a killed peer must be detected."""
BACK = 5.0
"""Seconds within which nodes must reconnect after their gateway's return."""
BUSY = 3
"""Factor for these times on a machine that runs other tests."""

PROGRAM = """
import gc, json, os, signal, sys
from pathlib import Path
import anyio, psutil, trio
from hypha_net import EndpointSettings, open_endpoint
from hypha_net.identity import load_identity
from libp2p.network.connection.swarm_connection import SwarmConn

def tasks(task):
    return 1 + sum(tasks(child) for nursery in task.child_nurseries for child in nursery.child_tasks)

async def tell(stream):
    gc.collect()
    process = psutil.Process()
    state = {"memory": process.memory_info().rss, "files": process.num_fds(),
             "tasks": tasks(trio.lowlevel.current_root_task())}
    await stream.send_all(json.dumps(state).encode())
    await stream.send_eof()

async def echo(stream):
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.send_eof()

def stop_when_it_takes_a_node():
    start = SwarmConn.start

    async def stop_first(connection):
        SwarmConn.start = start
        os.kill(os.getpid(), signal.SIGSTOP)
        await trio.sleep(0)  # expired deadlines take effect now
        await start(connection)

    SwarmConn.start = stop_first

async def main(cert, key, trust, listen, *extra):
    settings = EndpointSettings(listen_addresses=(listen,), role="gateway")
    async with open_endpoint(load_identity(Path(cert), Path(key), Path(trust)), settings) as gateway:
        if "stops" in extra:
            stop_when_it_takes_a_node()
        gateway.handle("/test/state/1", tell)
        gateway.handle("/test/echo/1", echo)
        print(gateway.addresses[0], flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:], backend="trio")
"""


class Gateway:
    """A gateway in its own process, which can be restarted at its port."""

    def __init__(self, files: tuple[Path, ...], *extra: str) -> None:
        self._files = files
        self._extra = extra
        self.address = LOOPBACK
        self._start()

    def _start(self) -> None:
        address = self.address.split("/p2p/")[0]
        command = [sys.executable, "-c", PROGRAM, *map(str, self._files), address, *self._extra]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = first_line(self.process)

    async def start(self) -> None:
        """Start it again; return when it listens."""
        await anyio.to_thread.run_sync(self._start)

    async def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        await anyio.to_thread.run_sync(self.process.wait)

    @property
    def peer(self) -> PeerId:
        """The gateway's peer id."""
        return PeerId.parse(self.address.rpartition("/")[2])


@asynccontextmanager
async def gateway_process(authority: Any, *extra: str) -> AsyncIterator[Gateway]:
    gateway = await anyio.to_thread.run_sync(Gateway, authority.files("gateway"), *extra)
    try:
        yield gateway
    finally:
        os.kill(gateway.process.pid, signal.SIGCONT)
        gateway.process.kill()
        gateway.process.wait()


async def leaves(stack: AsyncExitStack, authority: Any, gateway: Gateway, count: int) -> list[Libp2pEndpoint]:
    """Open nodes in this process that are connected to the gateway."""
    settings = EndpointSettings(gateway_addresses=(gateway.address,))
    nodes = [
        await stack.enter_async_context(open_endpoint(authority.identity(f"leaf{index}"), settings))
        for index in range(count)
    ]
    for node in nodes:
        await node.wait_for_gateway(20)
    return nodes


@pytest.mark.nightly
@pytest.mark.timeout(180)
async def test_a_suspended_gateway_is_detected_and_nodes_reconnect_when_it_resumes(authority: Any) -> None:
    async with gateway_process(authority) as gateway, AsyncExitStack() as stack:
        (leaf,) = await leaves(stack, authority, gateway, 1)
        await until(lambda: bool(leaf.addresses), 15)
        with leaf.events.follow(Disconnected) as events:
            gateway.process.send_signal(signal.SIGSTOP)
            stopped = anyio.current_time()
            with anyio.fail_after(SILENT + 10):
                ended = await next_event(events, Disconnected)
        assert (ended.peer, ended.reason) == (gateway.peer, "the peer is silent")
        assert not leaf.addresses
        await anyio.sleep(max(0.0, stopped + 50 - anyio.current_time()))
        gateway.process.send_signal(signal.SIGCONT)
        await until(lambda: bool(leaf.addresses), BUSY * BACK)


@pytest.mark.nightly
@pytest.mark.timeout(120)
async def test_a_gateway_suspended_while_it_accepts_a_node_keeps_the_connection(authority: Any) -> None:
    async with gateway_process(authority, "stops") as gateway, AsyncExitStack() as stack:
        (node,) = await leaves(stack, authority, gateway, 1)
        process = psutil.Process(gateway.process.pid)
        await until(lambda: process.status() == psutil.STATUS_STOPPED, 10)
        with node.events.follow(Disconnected) as events:
            await anyio.sleep(20)
            gateway.process.send_signal(signal.SIGCONT)
            await echo_once(node, gateway)
            await until(lambda: bool(node.addresses), BUSY * BACK)  # requests of the meantime are repeated
            with anyio.move_on_after(0.1) as scope:
                await anext(events)
            assert scope.cancelled_caught, "the connection was given up"


@pytest.mark.nightly
@pytest.mark.timeout(150)
async def test_thirty_nodes_reconnect_within_five_seconds_of_their_gateways_return(authority: Any) -> None:
    async with gateway_process(authority) as gateway, AsyncExitStack() as stack:
        nodes = await leaves(stack, authority, gateway, 30)
        await gateway.kill()
        await until(lambda: not any(node.connected_peers() for node in nodes), BUSY * KILLED)
        await anyio.sleep(15)  # until the pauses between attempts have their full length
        await gateway.start()
        await until(lambda: all(node.connected_peers() for node in nodes), BUSY * BACK)
        await until(lambda: all(node.addresses for node in nodes), BUSY * BACK)


async def state_of(node: Libp2pEndpoint, gateway: Gateway) -> dict[str, int]:
    """Return memory, descriptors and tasks of the gateway's process."""
    stream = await node.open_stream(gateway.peer, [STATE])
    await stream.send_eof()
    data = b""
    while part := await stream.receive_some():
        data += part
    await stream.aclose()
    return dict(json.loads(data))


def own_state() -> dict[str, int]:
    """Return memory, descriptors and tasks of this process."""
    gc.collect()

    def tasks(task: Any) -> int:
        return 1 + sum(tasks(child) for nursery in task.child_nurseries for child in nursery.child_tasks)

    process = psutil.Process()
    root = trio.lowlevel.current_root_task()
    return {"memory": process.memory_info().rss, "files": process.num_fds(), "tasks": tasks(root)}


async def echo_once(node: Libp2pEndpoint, gateway: Gateway) -> None:
    stream: Stream = await node.open_stream(gateway.peer, [ECHO])
    await stream.send_all(b"x")
    await stream.send_eof()
    assert await stream.receive_some() == b"x"
    await stream.aclose()


async def come_and_go(node: Libp2pEndpoint, gateway: Gateway, times: int) -> None:
    for _ in range(times):
        await node.connect(gateway.address)
        await echo_once(node, gateway)
        await node.disconnect(gateway.peer)


@pytest.mark.nightly
@pytest.mark.timeout(420)
async def test_a_thousand_connections_leak_no_memory_descriptors_or_tasks(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps every log record of py-libp2p with its traceback and locals, which would be measured
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    async with gateway_process(authority) as gateway, AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(open_endpoint(authority.identity(f"n{index}"), EndpointSettings()))
            for index in range(5)
        ]
        watcher = nodes.pop()
        await watcher.connect(gateway.address)
        states = []
        for times in (25, 250):  # by each of four nodes: a hundred to warm up, then a thousand
            async with anyio.create_task_group() as tasks:
                for node in nodes:
                    tasks.start_soon(come_and_go, node, gateway, times)
            await anyio.sleep(2)
            states.append((await state_of(watcher, gateway), own_state()))
        for before, after in zip(*states, strict=True):
            assert after["files"] <= before["files"] + 2, states
            assert after["tasks"] <= before["tasks"] + 4, states
            assert after["memory"] <= before["memory"] + (16 << 20), states
        await come_and_go(nodes[0], gateway, 1)
