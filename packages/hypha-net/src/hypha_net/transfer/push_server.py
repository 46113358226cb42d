"""Server of the push protocol: accepts or refuses each push, resumes what it has of it, and sends a receipt.

The other side is `push_client`. A repeated push replaces an earlier one that hangs. The connection of the earlier push
is usually dead, but this node may notice that half a minute after the peer. Until then the file would be locked, and
the push could not be resumed.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NoSpaceError, StreamResetError, TransferError, TransferRefusedError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.transfer.framing import (
    MAX_CONCURRENT,
    TransferInterruptedError,
    limited,
    receive_message,
    reset_on_error,
    send_message,
    send_refusal,
)
from hypha_net.transfer.io.partial_file import PartialFile, StorageQuota
from hypha_net.transfer.io.stream_copy import incoming_file, receive_and_verify
from hypha_net.transfer.progress import TransferProgress
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PUSH
from hypha_proto.texts import shorten
from hypha_proto.transfer import NO_ROOM, GoOn, PushAnswer, PushHeader, PushReceipt, Receipt, Refusal

_TAKEOVER_TIMEOUT: Final = 5.0
"""Seconds that an interrupted push may take to release its slot."""

SlotKey = tuple[PeerId, str]
"""Identifies what only one push of a peer at a time may write."""


@dataclass(slots=True, eq=False)
class _Holder:
    """Push that holds or waits for a slot."""

    sequence: int
    """A later push has a higher number."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    released: anyio.Event = field(default_factory=anyio.Event)


class PushSlots:
    """Slots of all pushes that one endpoint is receiving."""

    def __init__(self) -> None:
        self._holders: dict[SlotKey, _Holder] = {}
        self._sequence = itertools.count()

    @asynccontextmanager
    async def hold(self, key: SlotKey, what: str) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot; the push that holds it is cancelled first.

        Yields a function that releases the slot early: when everything is received, another push must not cancel its
        processing.

        Raises:
            TransferInterruptedError: another push of the same peer took over.
        """
        holder = _Holder(next(self._sequence))
        while (before := self._holders.get(key)) is not None:
            if before.sequence > holder.sequence:  # both have waited for the same push
                raise TransferInterruptedError(f"{key[0]} has started this push again")
            await self._interrupt(key, before, what)
        self._holders[key] = holder

        def release() -> None:
            holder.released.set()
            if self._holders.get(key) is holder:
                del self._holders[key]

        try:
            with holder.scope:
                yield release
            if holder.scope.cancelled_caught:
                raise TransferInterruptedError(f"{key[0]} has started this push again")
        finally:
            release()

    async def _interrupt(self, key: SlotKey, before: _Holder, what: str) -> None:
        _log.info("%s pushes %s again: cancelling its earlier push", key[0], what)
        before.scope.cancel()
        with anyio.move_on_after(_TAKEOVER_TIMEOUT):
            await before.released.wait()
        if self._holders.get(key) is before:
            del self._holders[key]


_log = logging.getLogger("hypha_net.transfer")


@dataclass(frozen=True, slots=True)
class FilePushTarget:
    """Accepts a push into a file."""

    path: Path
    max_bytes: int
    on_complete: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is complete at `path`, before the pusher gets its receipt."""
    slot: str | None = None
    """Of one peer's pushes into one slot only the last is received; earlier ones are cancelled."""
    quota: StorageQuota | None = None
    """Bounds what this and other transfers store together."""
    on_disk_error: Callable[[NoSpaceError | OSError], None] | None = None
    """Called when the file cannot be stored on this machine; the pusher gets a refusal."""


Accept = Callable[[PeerId, PushHeader], Awaitable[FilePushTarget | Refusal]]


def serve_pushes(endpoint: Endpoint, accept: Accept) -> None:
    """Receive what peers push, into the target that `accept(peer, header)` returns.

    A file is written beside its target and renamed when it is complete and its digest is correct. After an interrupted
    push the received bytes are kept, and the next push of the same content into the same folder resumes.
    """
    slots = PushSlots()

    async def serve(stream: Stream) -> None:
        async with reset_on_error(stream, f"push from {stream.peer}"):
            header: PushHeader = from_cbor(PushHeader, await receive_message(stream))
            about: dict[str, instrumentation.Value] = {"hypha.peer.id": str(stream.peer), "hypha.round": header.round}
            with instrumentation.serving(f"receive {shorten(header.kind, 40)}", header, about):
                target = await accept(stream.peer, header)
                if not isinstance(target, Refusal) and header.size > target.max_bytes:
                    target = Refusal(reason=f"{header.size} bytes are over the limit of {target.max_bytes}")
                if isinstance(target, Refusal):
                    await send_refusal(stream, PushAnswer, target)
                    return
                async with slots.hold(_slot_key(target, stream.peer, header), header.name) as release:
                    await _receive_push(endpoint, stream, target, header, release)

    endpoint.handle(PUSH, limited(serve, PerPeerLimiter(MAX_CONCURRENT)))


async def _receive_push(
    endpoint: Endpoint, stream: Stream, target: FilePushTarget, header: PushHeader, release: Callable[[], None]
) -> None:
    progress = TransferProgress(endpoint, stream.peer, shorten(header.name, 200), "received")
    try:
        with progress.report_outcome():
            size = await _receive_content(stream, target, header, progress, release)
    except (StreamResetError, TransferInterruptedError):
        raise
    except (TransferError, OSError) as error:
        reason = _refusal_reason(error)
        _log.warning("push of %s from %s refused: %s", header.name, stream.peer, reason)
        await send_refusal(stream, PushReceipt, Refusal(reason=reason))
        return
    await send_message(stream, to_cbor(PushReceipt, Receipt(size=size)))
    await stream.send_eof()


def _refusal_reason(error: TransferError | OSError) -> str:
    """Return the reason that the pusher gets; a full disk has a reason of its own, because a later push may succeed."""
    if isinstance(error, TransferRefusedError):
        return error.reason
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{NO_ROOM}: {error}"
    return str(error)


async def _receive_content(
    stream: Stream, target: FilePushTarget, header: PushHeader, progress: TransferProgress, release: Callable[[], None]
) -> int:
    async with _open_target(target, header) as content:
        await send_message(stream, to_cbor(PushAnswer, GoOn(offset=content.received)))
        progress.begin(content.received, header.size)
        size, digest = await receive_and_verify(stream, content, progress)
    release()
    await target.on_complete(size, digest)
    return size


def _slot_key(target: FilePushTarget, peer: PeerId, header: PushHeader) -> SlotKey:
    """Return the target's slot, or a key that only a repetition of this push shares.

    Equal content under another name is not a repetition: all empty files are equal.
    """
    if target.slot is not None:
        return peer, target.slot
    what = (header.attempt, header.round, header.kind, header.name, header.digest)
    return peer, "\0".join((str(target.path.parent), *map(str, what)))


@asynccontextmanager
async def _open_target(target: FilePushTarget, header: PushHeader) -> AsyncIterator[PartialFile]:
    """Start receiving a push, or resume what is there of it; see `incoming_file`."""
    try:
        async with incoming_file(target.path, header.size, header.digest, target.quota) as content:
            yield content
    except (NoSpaceError, OSError) as error:
        if target.on_disk_error is not None:
            target.on_disk_error(error)
        raise
