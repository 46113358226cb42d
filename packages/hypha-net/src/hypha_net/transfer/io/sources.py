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

from hypha_net.buffer_pool import BLOCK
from hypha_net.endpoint import Stream
from hypha_net.transfer.io.stream_copy import read_at, send_buffer, send_file
from hypha_net.transfer.progress import TransferProgress

Content = Path | FileIO | bytes
"""What can be sent: a file by its path, an open file, or bytes in memory."""


@dataclass(frozen=True, slots=True)
class Source:
    """Content that can be read repeatedly, from any byte on."""

    content: Content
    """An open file is closed by the caller."""

    def __str__(self) -> str:
        if isinstance(self.content, Path):
            return str(self.content)
        return "the file" if isinstance(self.content, FileIO) else "the bytes"

    @contextmanager
    def _open(self) -> Iterator[FileIO | bytes]:
        """Open a file that is given by its path; an open one is read even if another file takes its path."""
        if isinstance(self.content, Path):
            with FileIO(self.content) as file:
                yield file
        else:
            yield self.content

    def size(self) -> int:
        """Return its current size in bytes."""
        with self._open() as content:
            return len(content) if isinstance(content, bytes) else os.fstat(content.fileno()).st_size

    def describe(self) -> tuple[int, str]:
        """See `describe`; blocks."""
        with self._open() as content:
            if isinstance(content, bytes):
                return len(content), f"blake3:{blake3(content).hexdigest()}"
            return _describe_file(content)

    async def send(self, stream: Stream, offset: int, size: int, progress: TransferProgress) -> None:
        """Send the bytes from `offset` to `size`; raises the errors of `stream_copy.send_file`."""
        with self._open() as content:
            if isinstance(content, bytes):
                await send_buffer(stream, memoryview(content)[offset:size], progress)
            else:
                await send_file(stream, content, offset, size, progress)


async def describe(content: Content) -> tuple[int, str]:
    """Return size in bytes and digest (``blake3:…``) of a file or of bytes.

    If a file grows meanwhile, only the bytes that it has at first count.

    Raises:
        OSError: the file cannot be read.
    """
    return await anyio.to_thread.run_sync(Source(content).describe)


def _describe_file(file: FileIO) -> tuple[int, str]:
    hasher, size = blake3(), 0
    block = memoryview(bytearray(BLOCK))  # not memory-mapped, which would count as this process's memory
    left = os.fstat(file.fileno()).st_size
    while count := read_at(file, block[: min(BLOCK, left)], size):
        hasher.update(block[:count])
        size, left = size + count, left - count
    return size, f"blake3:{hasher.hexdigest()}"
