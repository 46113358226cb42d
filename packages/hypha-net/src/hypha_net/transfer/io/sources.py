"""Sources of a transfer: a file, by its path or open, or memory. The receiver cannot tell which.

`stream_copy` sends them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import anyio.to_thread
from blake3 import blake3

from hypha_net.endpoint import Stream
from hypha_net.transfer.io.stream_copy import CHUNK, read_at, send_buffer, send_file
from hypha_net.transfer.progress import TransferProgress

Buffer = bytes | bytearray | memoryview
"""Contiguous memory; pass the `memoryview` of other objects with a buffer, such as an array."""
Content = Path | FileIO | Buffer
"""What can be sent: a file by its path, an open file, or memory."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """File, by its path."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int:
        """Return its current size in bytes."""
        return self.path.stat().st_size

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        return await anyio.to_thread.run_sync(_describe_path, self.path)

    async def send(self, stream: Stream, offset: int, size: int, progress: TransferProgress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        with self.path.open("rb", buffering=0) as file:
            await send_file(stream, file, offset, size, progress)


@dataclass(frozen=True, slots=True)
class OpenFileSource:
    """Open file: its bytes are read even if another file takes its path. The caller closes it."""

    file: FileIO

    def __str__(self) -> str:
        return "the file"

    def size(self) -> int:
        """Return its current size in bytes."""
        return os.fstat(self.file.fileno()).st_size

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        return await anyio.to_thread.run_sync(_describe, self.file)

    async def send(self, stream: Stream, offset: int, size: int, progress: TransferProgress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        await send_file(stream, self.file, offset, size, progress)


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Buffer that must not change until the transfer has ended."""

    view: memoryview

    def __str__(self) -> str:
        return "the buffer"

    def size(self) -> int:
        """Return its current size in bytes."""
        return len(self.view)

    async def describe(self) -> tuple[int, str]:
        """See `describe`."""
        hasher = await anyio.to_thread.run_sync(blake3, self.view)
        return len(self.view), f"blake3:{hasher.hexdigest()}"

    async def send(self, stream: Stream, offset: int, size: int, progress: TransferProgress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        await send_buffer(stream, self.view[offset:size], progress)


Source = FileContent | OpenFileSource | MemorySource
"""Content that can be read repeatedly, from any byte on."""


def make_source(content: Content) -> Source:
    """Return the source that reads `content`.

    Raises:
        TypeError: it is neither a file nor contiguous memory.
    """
    if isinstance(content, FileIO):
        return OpenFileSource(content)
    return FileContent(content) if isinstance(content, Path) else MemorySource(memoryview(content).cast("B"))


async def describe(content: Content) -> tuple[int, str]:
    """Return size in bytes and digest (``blake3:…``) of a file or a buffer.

    If a file grows meanwhile, only the bytes that it has at first count.

    Raises:
        OSError: the file cannot be read.
        TypeError: it is neither a file nor contiguous memory.
    """
    return await make_source(content).describe()


def _describe_path(path: Path) -> tuple[int, str]:
    with path.open("rb", buffering=0) as file:
        return _describe(file)


def _describe(file: FileIO) -> tuple[int, str]:
    hasher, size = blake3(), 0
    block = memoryview(bytearray(CHUNK))  # not memory-mapped, which would count as this process's memory
    left = os.fstat(file.fileno()).st_size
    while count := read_at(file, block[: min(CHUNK, left)], size):
        hasher.update(block[:count])
        size, left = size + count, left - count
    return size, f"blake3:{hasher.hexdigest()}"
