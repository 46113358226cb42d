"""Where the bytes of a transfer go: a file, or memory. A sender cannot tell which.

After this room: `push` and `pull` talk about them, `moving` fills them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio.to_thread

from hypha_net.transfer.io.partial_buffer import PartialBuffer
from hypha_net.transfer.io.partial_file import IncomingContent, left_behind
from hypha_net.transfer.io.stream_copy import arriving_at


class Sink(Protocol):
    """A place that shows content only when it is whole, and keeps what came of a broken transfer."""

    async def left_behind(self, digest: str | None) -> int:
        """How many bytes of content with this digest are there already."""
        ...

    def arriving(self, size: int | None, digest: str | None) -> AbstractAsyncContextManager[IncomingContent]:
        """Begin, or take up what is there. Whatever happens inside, what came is kept or dropped.

        Raises:
            TransferError: there is no room for it.
            OSError: the place cannot be written.
        """
        ...


class FileSink:
    """A file, by its path; what is incomplete waits beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def left_behind(self, digest: str | None) -> int:
        """See `Destination.left_behind`."""
        return await anyio.to_thread.run_sync(left_behind, self._path, digest)

    def arriving(self, size: int | None, digest: str | None) -> AbstractAsyncContextManager[IncomingContent]:
        """See `Destination.arriving`."""
        return arriving_at(self._path, size, digest)


class MemorySink:
    """Memory of this process."""

    def __init__(self, left: PartialBuffer | None = None) -> None:
        self.left = left
        """What is there of incomplete content."""
        self.data = bytearray()
        """The content, once it is whole; empty before."""

    async def left_behind(self, digest: str | None) -> int:
        """See `Destination.left_behind`."""
        return self.left.received if self.left is not None and self.left.digest == digest else 0

    @asynccontextmanager
    async def arriving(self, size: int | None, digest: str | None) -> AsyncIterator[IncomingContent]:
        """See `Destination.arriving`."""
        left, self.left = self.left, None
        gathering = left if left is not None and left.goes_on_with(size, digest) else PartialBuffer(size, digest)
        try:
            yield gathering
        finally:
            if gathering.whole:
                self.data = gathering.data
            elif gathering.worth_keeping:
                self.left = gathering
