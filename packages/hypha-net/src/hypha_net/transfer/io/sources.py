"""Where the bytes of a transfer come from: a file, or memory. A receiver cannot tell which.

After this room: `push` and `pull` talk about them, `moving` sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio.to_thread
from blake3 import blake3

from hypha_net.endpoint import Stream
from hypha_net.transfer.io.stream_copy import CHUNK, send_buffer, send_file
from hypha_net.transfer.progress import Progress

Buffer = bytes | bytearray | memoryview
"""Contiguous memory; of other things that lend theirs (an array of numbers) take the `memoryview`."""


class Source(Protocol):
    """Content that can be read again and again, from any byte on."""

    def measure(self) -> int:
        """How many bytes it has now."""
        ...

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        ...

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """Send what lies between `offset` and `size`; raises as `moving.send_file`."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def measure(self) -> int:
        """See `Source.measure`."""
        return self.path.stat().st_size

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        return await anyio.to_thread.run_sync(_describe, self.path)

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """See `Source.send`."""
        await send_file(stream, self.path, offset, size, progress)


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Bytes that stay as they are until the transfer is over."""

    view: memoryview

    def __str__(self) -> str:
        return "the buffer"

    def measure(self) -> int:
        """See `Source.measure`."""
        return len(self.view)

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        hasher = await anyio.to_thread.run_sync(blake3, self.view)
        return len(self.view), f"blake3:{hasher.hexdigest()}"

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """See `Source.send`."""
        await send_buffer(stream, self.view[offset:size], progress)


def source_of(content: Path | Buffer) -> Source:
    """The source that reads `content`.

    Raises:
        TypeError: it is neither a path nor contiguous memory.
    """
    return FileSource(content) if isinstance(content, Path) else MemorySource(memoryview(content).cast("B"))


async def describe(content: Path | Buffer) -> tuple[int, str]:
    """Size in bytes and digest (``blake3:…``) of a file or a buffer.

    Raises:
        OSError: the file cannot be read.
        TypeError: it is neither a path nor contiguous memory.
    """
    return await source_of(content).describe()


def _describe(path: Path) -> tuple[int, str]:
    hasher, size = blake3(), 0
    with path.open("rb", buffering=0) as file:  # not mapped: that would count as this process's memory
        block = memoryview(bytearray(CHUNK))
        while count := file.readinto(block):
            hasher.update(block[:count])
            size += count
    return size, f"blake3:{hasher.hexdigest()}"
