"""Destinations of a transfer: a file or memory. The sender cannot tell which.

`stream_copy` fills them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from hypha_net.transfer.io.integrity import IncomingContent
from hypha_net.transfer.io.partial_buffer import PartialBuffer
from hypha_net.transfer.io.partial_file import StorageQuota, open_partial_file, resumable_bytes


class Sink(Protocol):
    """Destination that publishes content only when it is complete, and keeps what an interrupted transfer received."""

    async def resumable_bytes(self, digest: str | None) -> int:
        """Return how many bytes of content with this digest are there already."""
        ...

    def open(self, size: int, digest: str) -> AbstractAsyncContextManager[IncomingContent]:
        """Start receiving, or resume what is there. On exit what was received is kept or discarded.

        Raises:
            TransferError: there is no space for it.
            OSError: the file cannot be written.
        """
        ...


class FileSink:
    """File, by its path; an incomplete file lies beside it."""

    def __init__(self, path: Path, quota: StorageQuota | None = None) -> None:
        self._path, self._quota = path, quota

    async def resumable_bytes(self, digest: str | None) -> int:
        """See `Sink.resumable_bytes`."""
        return await anyio.to_thread.run_sync(resumable_bytes, self._path, digest)

    @asynccontextmanager
    async def open(self, size: int, digest: str) -> AsyncIterator[IncomingContent]:
        """See `Sink.open`."""
        with anyio.CancelScope(shield=True):
            partial = await anyio.to_thread.run_sync(open_partial_file, self._path, size, digest, self._quota)
        try:
            yield partial
        finally:
            if not partial.file.closed:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(partial.suspend)


class MemorySink:
    """Buffer in the memory of this process."""

    def __init__(self) -> None:
        self.data = bytearray()
        """The content once it is complete; empty before."""
        self._suspended: PartialBuffer | None = None

    async def resumable_bytes(self, digest: str | None) -> int:
        """See `Sink.resumable_bytes`."""
        return self._suspended.received if self._suspended is not None and self._suspended.digest == digest else 0

    @asynccontextmanager
    async def open(self, size: int, digest: str) -> AsyncIterator[IncomingContent]:
        """See `Sink.open`."""
        suspended, self._suspended = self._suspended, None
        partial = suspended if suspended and suspended.is_start_of(size, digest) else PartialBuffer(size, digest)
        try:
            yield partial
        finally:
            if partial.is_complete:
                self.data = partial.data
            elif partial.is_resumable:
                self._suspended = partial
