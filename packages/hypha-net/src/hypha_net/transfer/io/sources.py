"""Sources of a transfer: a file, by its path or open, or memory. The receiver cannot tell which.

`stream_copy` sends them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
class Source:
    """Content that can be read repeatedly, from any byte on; made by `make_source`."""

    content: Path | FileIO | memoryview
    """An open file is closed by the caller, and a buffer must not change until the transfer has ended."""

    def __str__(self) -> str:
        if isinstance(self.content, Path):
            return str(self.content)
        return "the file" if isinstance(self.content, FileIO) else "the buffer"

    @contextmanager
    def _open(self) -> Iterator[FileIO | memoryview]:
        """Open a file that is given by its path; an open one is read even if another file takes its path."""
        if isinstance(self.content, Path):
            with FileIO(self.content) as file:
                yield file
        else:
            yield self.content

    def size(self) -> int:
        """Return its current size in bytes."""
        with self._open() as content:
            return len(content) if isinstance(content, memoryview) else os.fstat(content.fileno()).st_size

    def describe(self) -> tuple[int, str]:
        """See `describe`; blocks."""
        with self._open() as content:
            if isinstance(content, memoryview):
                return len(content), f"blake3:{blake3(content).hexdigest()}"
            return _describe_file(content)

    async def send(self, stream: Stream, offset: int, size: int, progress: TransferProgress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        with self._open() as content:
            if isinstance(content, memoryview):
                await send_buffer(stream, content[offset:size], progress)
            else:
                await send_file(stream, content, offset, size, progress)


def make_source(content: Content) -> Source:
    """Return the source that reads `content`.

    Raises:
        TypeError: it is neither a file nor contiguous memory.
    """
    return Source(content if isinstance(content, Path | FileIO) else memoryview(content).cast("B"))


async def describe(content: Content) -> tuple[int, str]:
    """Return size in bytes and digest (``blake3:…``) of a file or a buffer.

    If a file grows meanwhile, only the bytes that it has at first count.

    Raises:
        OSError: the file cannot be read.
        TypeError: it is neither a file nor contiguous memory.
    """
    return await anyio.to_thread.run_sync(make_source(content).describe)


def _describe_file(file: FileIO) -> tuple[int, str]:
    hasher, size = blake3(), 0
    block = memoryview(bytearray(CHUNK))  # not memory-mapped, which would count as this process's memory
    left = os.fstat(file.fileno()).st_size
    while count := read_at(file, block[: min(CHUNK, left)], size):
        hasher.update(block[:count])
        size, left = size + count, left - count
    return size, f"blake3:{hasher.hexdigest()}"
