"""Sources of a transfer: a file or memory. The receiver cannot tell which.

Called by `push_client` and `pull_server`; calls `stream_copy` to send.
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
"""Contiguous memory; pass the `memoryview` of other objects with a buffer, such as an array."""


class Source(Protocol):
    """Content that can be read repeatedly, from any byte on."""

    def size(self) -> int:
        """Return its current size in bytes."""
        ...

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        ...

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """File, by its path."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        """See `Source.size`."""
        return self.path.stat().st_size

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        return await anyio.to_thread.run_sync(_describe, self.path)

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """See `Source.send`."""
        await send_file(stream, self.path, offset, size, progress)


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Buffer that must not change until the transfer has ended."""

    view: memoryview

    def __str__(self) -> str:
        return "the buffer"

    def size(self) -> int:
        """See `Source.size`."""
        return len(self.view)

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        hasher = await anyio.to_thread.run_sync(blake3, self.view)
        return len(self.view), f"blake3:{hasher.hexdigest()}"

    async def send(self, stream: Stream, offset: int, size: int, progress: Progress) -> None:
        """See `Source.send`."""
        await send_buffer(stream, self.view[offset:size], progress)


def make_source(content: Path | Buffer) -> Source:
    """Return the source that reads `content`.

    Raises:
        TypeError: it is neither a path nor contiguous memory.
    """
    return FileSource(content) if isinstance(content, Path) else MemorySource(memoryview(content).cast("B"))


async def describe(content: Path | Buffer) -> tuple[int, str]:
    """Return size in bytes and digest (``blake3:…``) of a file or a buffer.

    Raises:
        OSError: the file cannot be read.
        TypeError: it is neither a path nor contiguous memory.
    """
    return await make_source(content).describe()


def _describe(path: Path) -> tuple[int, str]:
    hasher, size = blake3(), 0
    with path.open("rb", buffering=0) as file:  # not memory-mapped, which would count as this process's memory
        block = memoryview(bytearray(CHUNK))
        while count := file.readinto(block):
            hasher.update(block[:count])
            size += count
    return size, f"blake3:{hasher.hexdigest()}"
