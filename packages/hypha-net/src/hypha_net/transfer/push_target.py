"""Where a push may land: in a file or in memory, as whoever serves the pushes chooses for each.

Before this room: `push.serve_pushes` asked. After it: `moving` fills what was chosen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hypha_net.transfer.io.partial_buffer import Waiting
from hypha_net.transfer.io.partial_file import IncomingContent
from hypha_net.transfer.io.sinks import FileSink, MemorySink
from hypha_net.transfer.push_slots import Place
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader


@dataclass(frozen=True, slots=True)
class FilePushTarget:
    """Where a pushed file may land."""

    path: Path
    max_bytes: int
    arrived: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is whole at `path`, before the pusher gets its receipt."""
    slot: str | None = None
    """Of one peer's pushes with headers into one slot only the last is written: room for more is not made."""


@dataclass(frozen=True, slots=True)
class MemoryPushTarget:
    """Lets a push land in memory."""

    max_bytes: int
    """Of one push; a peer may have `wire.AT_ONCE` of them under way, or one a slot."""
    arrived: Callable[[bytearray, str], Awaitable[None]]
    """Awaited with the content and its digest when it is whole, before the pusher gets its receipt; the content is
    the callee's."""
    slot: str | None = None
    """See `Landing.slot`."""


class PushSink(Protocol):
    """A landing as one push uses it."""

    @property
    def name(self) -> str:
        """What a push without a header is called."""
        ...

    @property
    def max_bytes(self) -> int:
        """More is not taken."""
        ...

    def place(self, header: PushHeader) -> Place:
        """What the push holds while it writes."""
        ...

    def arriving(self, size: int | None, digest: str | None) -> AbstractAsyncContextManager[IncomingContent]:
        """See `destinations.Destination.arriving`."""
        ...

    async def arrived(self, size: int, digest: str) -> None:
        """Tell whoever waits for it."""
        ...


class _FileBerth:
    def __init__(self, landing: FilePushTarget, peer: PeerId) -> None:
        self._landing, self._peer = landing, peer
        self.name: Final = landing.path.name
        self.max_bytes: Final = landing.max_bytes

    def place(self, header: PushHeader) -> Place:
        return _place(self._landing, self._peer, header, str(self._landing.path.parent))

    def arriving(self, size: int | None, digest: str | None) -> AbstractAsyncContextManager[IncomingContent]:
        return FileSink(self._landing.path).arriving(size, digest)

    async def arrived(self, size: int, digest: str) -> None:
        await self._landing.arrived(size, digest)


class _MemoryBerth:
    name: Final = "a push into memory"

    def __init__(self, landing: MemoryPushTarget, peer: PeerId, waiting: Waiting) -> None:
        self._landing, self._peer, self._waiting = landing, peer, waiting
        self._into = MemorySink()
        self.max_bytes: Final = landing.max_bytes

    def place(self, header: PushHeader) -> Place:
        return _place(self._landing, self._peer, header, "memory")

    @asynccontextmanager
    async def arriving(self, size: int | None, digest: str | None) -> AsyncIterator[IncomingContent]:
        if digest is not None:
            self._into.left = self._waiting.take(self._peer, digest)
        try:
            async with self._into.arriving(size, digest) as arriving:
                yield arriving
        finally:
            if self._into.left is not None:
                self._waiting.keep(self._peer, self._into.left)

    async def arrived(self, size: int, digest: str) -> None:
        await self._landing.arrived(self._into.data, digest)


def _place(landing: FilePushTarget | MemoryPushTarget, peer: PeerId, header: PushHeader, where: str) -> Place:
    """The landing's slot, or where a repetition of this very push would land.

    Equal content under another name is no repetition: empty files are all equal.
    """
    if landing.slot is not None:
        return peer, landing.slot
    what = (header.job_id, header.round, header.kind[:200], header.name[:200], header.digest)
    return peer, "\0".join((where, *map(str, what)))


def berth_of(landing: FilePushTarget | MemoryPushTarget, peer: PeerId, waiting: Waiting) -> PushSink:
    """The berth for one push of `peer`'s; in memory it goes on from what is `waiting` there."""
    if isinstance(landing, FilePushTarget):
        return _FileBerth(landing, peer)
    return _MemoryBerth(landing, peer, waiting)
