"""The Rust peer as a process: built once, told what to do, and asked what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

CRATE = Path(__file__).parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", Path(tempfile.gettempdir()) / "hypha-interop-target"))
JOBS = "2"


def build() -> Path:
    """Build the peer with cargo and give its path; the first time takes ten minutes and more on two cores.

    Raises:
        RuntimeError: there is no cargo, or it fails; with its last lines.
    """
    command = ["cargo", "build", "--locked", "--jobs", JOBS]
    try:
        made = subprocess.run(
            command, cwd=CRATE, env={**os.environ, "CARGO_TARGET_DIR": str(TARGET)}, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise RuntimeError("cargo is not installed: these tests need Rust's toolchain (see README.md)") from None
    if made.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{made.stderr[-4000:]}")
    return TARGET / "debug" / "hypha-interop"


class RustError(Exception):
    """What a command of the Rust peer failed with."""


@dataclass
class RustPeer:
    """One Rust process."""

    process: anyio.abc.Process
    said: list[dict[str, Any]] = field(default_factory=list)
    """What it has told, in order."""
    _asked: int = 0
    _changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def id(self) -> str:
        """Its peer id."""
        return str(self.of("started")[0]["peer"])

    @property
    def address(self) -> str:
        """A TCP address that it listens on, with its peer id."""
        found = [line["address"] for line in self.of("listening") if "p2p-circuit" not in line["address"]]
        return f"{found[0]}/p2p/{self.id}"

    def of(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """What was told of a kind, with these values."""
        return [line for line in self.said if line["kind"] == kind and like.items() <= line.items()]

    async def until(self, kind: str, count: int = 1, timeout: float = 15, **like: Any) -> dict[str, Any]:
        """Wait until something was told so often; gives the last of it."""
        with anyio.move_on_after(timeout):
            while len(self.of(kind, **like)) < count:
                await self._changed.wait()
        found = self.of(kind, **like)
        assert len(found) >= count, f"{count} of {kind} {like} not within {timeout} s: {self.said[-20:]}"
        return found[-1]

    async def start(self, do: str, **what: Any) -> int:
        """Give a command; gives its number."""
        self._asked += 1
        number = self._asked
        assert self.process.stdin is not None
        await self.process.stdin.send(json.dumps({"id": number, "do": do, **what}).encode() + b"\n")
        return number

    async def result(self, number: int, timeout: float = 30) -> Any:
        """The result of a command. Raises `RustError`."""
        await self.until("answer", timeout=timeout, id=number)
        line = self.of("answer", id=number)[0]  # a look-up goes on answering
        if "error" in line:
            raise RustError(line["error"])
        return line["result"]

    async def do(self, do: str, timeout: float = 30, **what: Any) -> Any:
        """Give a command and wait for its result. Raises `RustError`."""
        return await self.result(await self.start(do, **what), timeout)

    async def listen(self) -> None:
        """Take what it tells until it ends."""
        assert self.process.stdout is not None
        text = b""
        async for part in self.process.stdout:
            *whole, text = (text + part).split(b"\n")
            for line in whole:
                self.said.append(json.loads(line))
            self._changed.set()
            self._changed = anyio.Event()


@asynccontextmanager
async def rust_peer(binary: Path, identity: Path, **settings: Any) -> AsyncIterator[RustPeer]:
    """A running Rust peer that listens on a port of its own; its process is gone at the end."""
    told = {"identity": str(identity), "listen": ["/ip4/127.0.0.1/tcp/0"], **settings}
    async with anyio.create_task_group() as tasks:
        process = await anyio.open_process([str(binary), json.dumps(told)], stdin=subprocess.PIPE, stderr=None)
        peer = RustPeer(process)
        tasks.start_soon(peer.listen)
        try:
            await peer.until("started")
            if told["listen"]:
                await peer.until("listening")
            yield peer
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()
            tasks.cancel_scope.cancel()
