"""Targets of incoming pushes: a file or memory, as the callback of `serve_pushes` chooses for each push.

Called by `push_server`; calls `io.sinks`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hypha_net.errors import NoSpaceError
from hypha_net.transfer.io.integrity import IncomingContent
from hypha_net.transfer.io.partial_buffer import SuspendedBuffers
from hypha_net.transfer.io.sinks import FileSink, MemorySink
from hypha_net.transfer.io.storage_quota import StorageQuota
from hypha_net.transfer.push_slots import SlotKey
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader


@dataclass(frozen=True, slots=True)
class FilePushTarget:
    """Accepts a push into a file."""

    path: Path
    max_bytes: int
    on_complete: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is complete at `path`, before the pusher gets its receipt."""
    slot: str | None = None
    """Of one peer's pushes with headers into one slot only the last is received; earlier ones are cancelled."""
    quota: StorageQuota | None = None
    """Bounds what this and other transfers store together."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when the file cannot be stored on this machine; the pusher gets a refusal."""


@dataclass(frozen=True, slots=True)
class MemoryPushTarget:
    """Accepts a push into memory."""

    max_bytes: int
    """Limit of one push; a peer may have `framing.MAX_CONCURRENT` of them in progress, or one per slot."""
    on_complete: Callable[[bytearray, str], Awaitable[None]]
    """Awaited with the content and its digest when it is complete, before the pusher gets its receipt; the callee owns
    the content."""
    slot: str | None = None
    """See `FilePushTarget.slot`."""


class PushSink(Protocol):
    """Target of one push."""

    @property
    def name(self) -> str:
        """Name of a push without a header, for events."""
        ...

    @property
    def max_bytes(self) -> int:
        """Largest accepted size in bytes."""
        ...

    def slot_key(self, header: PushHeader) -> SlotKey:
        """Return the slot that the push holds while it writes."""
        ...

    def open(self, size: int | None, digest: str | None) -> AbstractAsyncContextManager[IncomingContent]:
        """See `Sink.open`."""
        ...

    async def complete(self, size: int, digest: str) -> None:
        """Pass the complete content to `on_complete`."""
        ...


class _FilePushSink:
    def __init__(self, target: FilePushTarget, peer: PeerId) -> None:
        self._target, self._peer = target, peer
        self.name: Final = target.path.name
        self.max_bytes: Final = target.max_bytes

    def slot_key(self, header: PushHeader) -> SlotKey:
        return _slot_key(self._target, self._peer, header, str(self._target.path.parent))

    @asynccontextmanager
    async def open(self, size: int | None, digest: str | None) -> AsyncIterator[IncomingContent]:
        try:
            async with FileSink(self._target.path, self._target.quota).open(size, digest) as content:
                yield content
        except (NoSpaceError, OSError) as error:
            if self._target.on_disk_error is not None:
                self._target.on_disk_error(error)
            raise

    async def complete(self, size: int, digest: str) -> None:
        await self._target.on_complete(size, digest)


class _MemoryPushSink:
    name: Final = "a push into memory"

    def __init__(self, target: MemoryPushTarget, peer: PeerId, suspended: SuspendedBuffers) -> None:
        self._target, self._peer, self._suspended = target, peer, suspended
        self._sink = MemorySink()
        self.max_bytes: Final = target.max_bytes

    def slot_key(self, header: PushHeader) -> SlotKey:
        return _slot_key(self._target, self._peer, header, "memory")

    @asynccontextmanager
    async def open(self, size: int | None, digest: str | None) -> AsyncIterator[IncomingContent]:
        if digest is not None:
            self._sink.resume_from(self._suspended.take(self._peer, digest))
        try:
            async with self._sink.open(size, digest) as content:
                yield content
        finally:
            if (left := self._sink.take_suspended()) is not None:
                self._suspended.keep(self._peer, left)

    async def complete(self, size: int, digest: str) -> None:
        await self._target.on_complete(self._sink.data, digest)


def _slot_key(target: FilePushTarget | MemoryPushTarget, peer: PeerId, header: PushHeader, where: str) -> SlotKey:
    """Return the target's slot, or a key that only a repetition of this push shares.

    Equal content under another name is not a repetition: all empty files are equal.
    """
    if target.slot is not None:
        return peer, target.slot
    what = (header.job_id, header.lease, header.round, header.kind[:200], header.name[:200], header.digest)
    return peer, "\0".join((where, *map(str, what)))


def push_sink(target: FilePushTarget | MemoryPushTarget, peer: PeerId, suspended: SuspendedBuffers) -> PushSink:
    """Return the sink of one push by `peer`; in memory it resumes a buffer from `suspended`."""
    if isinstance(target, FilePushTarget):
        return _FilePushSink(target, peer)
    return _MemoryPushSink(target, peer, suspended)
