"""Nodes in child processes for tests: gateways, and several leaf nodes in one process, controlled over pipes.

A child reads one JSON command per line and writes one JSON line per event; times are of the machine's monotonic clock,
which all processes share.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from support.waiting import until

TOPIC = "test/topic"

CHILD = """
import json, sys, time
from contextlib import AsyncExitStack
from pathlib import Path
import anyio, trio
from hypha_net import EndpointSettings, open_endpoint
from hypha_net.errors import NetError
from hypha_net.events import CircuitEnded, HolePunched
from hypha_net.identity import load_identity
from hypha_proto.ids import PeerId

TOPIC, WHO = "test/topic", "/test/who/1"

def tell(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)

async def hear(index, messages):
    async for message in messages:
        tell(kind="heard", leaf=index, text=message.data.decode())

async def publish(index, node, text, count, pause):
    for n in range(count):
        said = text if count == 1 else f"{text}-{n}"
        tell(kind="published", leaf=index, text=said)
        await node.publish(TOPIC, said.encode())
        if count > 1:
            await anyio.sleep(pause)

async def watch(index, node):
    told = None
    while True:
        state = {"topic": len(node.topic_peers(TOPIC)), "peers": len(node.connected_peers())}
        if state != told:
            told = state
            tell(kind="state", leaf=index, **state)
        await anyio.sleep(0.05)

async def who_asks(stream):
    await stream.send_all(str(stream.peer).encode())

async def reach(node, peer):
    began = time.monotonic()
    try:
        stream = await node.open_stream(peer, [WHO], timeout=10)
        with anyio.fail_after(10):
            answer = b""
            while part := await stream.receive_some():
                answer += part
        await stream.aclose()
    except (NetError, TimeoutError) as error:
        return {"error": str(error) or "no answer"}
    return {"answer": answer.decode(), "seconds": time.monotonic() - began, "direct": node.is_direct(peer)}

async def tell_punches(index, node):
    with node.events.follow(HolePunched) as punched:
        async for event in punched:
            tell(kind="punched", leaf=index, outcome=event.outcome, seconds=event.seconds)

async def tell_circuits(index, node):
    with node.events.follow(CircuitEnded) as ended:
        async for event in ended:
            tell(kind="circuit", leaf=index, outcome=event.outcome)

async def answer(nodes, tasks, command):
    node = nodes[command["leaf"]]
    match command["do"]:
        case "publish":
            await publish(command["leaf"], node, command["text"], command.get("count", 1), command.get("pause", 0))
        case "reach":
            tell(kind="reached", leaf=command["leaf"], **await reach(node, PeerId.parse(command["peer"])))
        case "put":
            await node.put_record(command["key"].encode(), command["value"].encode(), ttl=command["ttl"])
            tell(kind="put", leaf=command["leaf"])
        case "find":
            found = await node.find_records(command["key"].encode())
            tell(kind="found", leaf=command["leaf"], records=[[str(r.publisher), r.value.decode()] for r in found])

def plain(settings):
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return {**made, "state_dir": Path(made["state_dir"])} if "state_dir" in made else made

async def main(nodes, settings):
    async with AsyncExitStack() as stack:
        opened = []
        for files in nodes:
            identity = load_identity(*map(Path, files))
            opened.append(await stack.enter_async_context(open_endpoint(identity, EndpointSettings(**settings))))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for index, node in enumerate(opened):
            node.handle(WHO, who_asks)
            tasks.start_soon(hear, index, await stack.enter_async_context(node.subscribe(TOPIC)))
            tasks.start_soon(watch, index, node)
            tasks.start_soon(tell_punches, index, node)
            tasks.start_soon(tell_circuits, index, node)
        tell(kind="open", addresses=[list(node.addresses) for node in opened], ids=[str(n.peer_id) for n in opened])
        lines = trio.lowlevel.FdStream(0)
        text = b""
        while part := await lines.receive_some(65536):
            *whole, text = (text + part).split(b"\\n")
            for line in whole:
                tasks.start_soon(answer, opened, tasks, json.loads(line))
        tasks.cancel_scope.cancel()

nodes, settings = json.loads(sys.argv[1])
anyio.run(main, nodes, plain(settings), backend="trio")
"""


@dataclass
class Child:
    """One child process and the events it has written."""

    process: anyio.abc.Process
    log: Path
    said: list[dict[str, Any]] = field(default_factory=list)
    heard: Counter[str] = field(default_factory=Counter)
    """How often its nodes have received a message, by text."""

    async def do(self, leaf: int, do: str, **what: Any) -> None:
        """Send a command to a leaf node."""
        assert self.process.stdin is not None
        await self.process.stdin.send(json.dumps({"leaf": leaf, "do": do, **what}).encode() + b"\n")

    def of(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """Return the events of a kind with these fields."""
        return [line for line in self.said if line["kind"] == kind and like.items() <= line.items()]

    async def opened(self) -> dict[str, Any]:
        """Wait until its endpoints are open; return their addresses."""
        await until(lambda: bool(self.of("open")) or self.process.returncode is not None, 60)
        assert self.process.returncode is None, self.log.read_text()[-3000:]
        return self.of("open")[0]

    def stop(self) -> None:
        """Suspend the process with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the process with SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its exit."""
        self.process.kill()
        await self.process.wait()

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        text = b""
        async for part in self.process.stdout:
            *whole, text = (text + part).split(b"\n")
            for line in map(json.loads, whole):
                self.said.append(line)
                if line["kind"] == "heard":
                    self.heard[line["text"]] += 1


@asynccontextmanager
async def crew(log: Path) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that starts a child process; all children are killed at the end.

    Their output goes to `log`. The function takes the identity files of each node, endpoint settings, and a command
    prefix (such as ``ip netns exec NAME``).
    """
    started: list[Child] = []
    async with anyio.create_task_group() as tasks:
        stderr = log.open("a")

        async def start(nodes: list[tuple[Path, ...]], settings: dict[str, Any], prefix: tuple[str, ...] = ()) -> Child:
            told = json.dumps([[[str(path) for path in files] for files in nodes], settings], default=str)
            command = [*prefix, sys.executable, "-c", CHILD, told]
            child = Child(await anyio.open_process(command, stdin=subprocess.PIPE, stderr=stderr), log)
            started.append(child)
            tasks.start_soon(child._listen)
            return child

        try:
            yield start
        finally:
            with anyio.CancelScope(shield=True):
                for child in started:
                    if child.process.returncode is None:
                        child.process.kill()
                    await child.process.wait()
            stderr.close()
            tasks.cancel_scope.cancel()
