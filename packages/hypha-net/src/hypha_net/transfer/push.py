"""Push: the sender says what it brings, the receiver from which byte on it wants it, and in the end that it has it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import telemetry
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import StreamDroppedError, StreamResetError, TransferError, TransferRefusedError
from hypha_net.transfer.arriving import waiting_name
from hypha_net.transfer.moving import arriving_at, receive_whole, send_file
from hypha_net.transfer.progress import Progress
from hypha_net.transfer.retries import Drops, take_up_again
from hypha_net.transfer.wire import AT_ONCE, BrokenOffError, ending, guarded, receive_message, refuse, send_message
from hypha_net.turns import Turns
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocol import PUSH, PUSH_WITH_HEADER
from hypha_proto.transfer import GoOn, PushAnswer, PushHeader, PushReceipt, Receipt, Refusal

_log = logging.getLogger("hypha_net.transfer")

END_TIMEOUT: Final = 5.0
"""Seconds that a peer of the old wire may take to end the stream, once it has the file, before it is believed to."""
_TAKE_OVER: Final = 5.0
"""Seconds that a broken push may take to let go of its file when the peer is back with it."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a pushed file may land."""

    path: Path
    max_bytes: int
    arrived: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is whole at `path`, before the pusher gets its receipt."""
    slot: str | None = None
    """Of one peer's pushes with headers into one slot only the last is written: room for more is not made."""


Accept = Callable[[PeerId, PushHeader | None], Awaitable[Landing | Refusal]]


async def push(endpoint: Endpoint, peer: PeerId, path: Path, header: PushHeader, *, timeout: float = 600.0) -> int:
    """Push the file at `path` to `peer` and wait for its receipt; returns the bytes sent, repeated ones included.

    A push that breaks off is taken up again a few times, from where the peer has it. Falls back to the old wire's push,
    which has neither header nor receipt, and is repeated only where the peer dropped the stream unread.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not take the file, and says why.
        TransferError: the stream broke off, the peer's answers make no sense, or `timeout` seconds have passed.
        OSError: the file cannot be read.
    """
    outgoing = _Outgoing(endpoint, peer, path, header)
    with outgoing.progress.told():
        try:
            with anyio.fail_after(timeout):
                return await take_up_again(outgoing.attempt, outgoing.what)
        except TimeoutError:
            raise TransferError(f"{outgoing.what} was not done within {timeout:g} s") from None


@dataclass(slots=True)
class _Outgoing:
    endpoint: Endpoint
    peer: PeerId
    path: Path
    header: PushHeader
    progress: Progress = field(init=False)
    drops: Drops = field(default_factory=Drops)

    def __post_init__(self) -> None:
        self.progress = Progress(self.endpoint, self.peer, self.header.name, "sent")

    @property
    def what(self) -> str:
        return f"push of {self.header.name} to {self.peer}"

    async def attempt(self) -> int:
        try:
            stream = await self.endpoint.open_stream(self.peer, [PUSH_WITH_HEADER, PUSH])
        except StreamDroppedError as error:
            raise self.drops.bear(error, error) from error
        if stream.protocol == PUSH:
            return await self._bare(stream)
        async with ending(stream, self.what):
            await self._headed(stream)
        return self.progress.moved_in_all

    async def _bare(self, stream: Stream) -> int:
        try:
            async with ending(stream, self.what):
                size = self.path.stat().st_size
                self.progress.begin(0, size)
                await send_file(stream, self.path, 0, size, self.progress)
                await stream.send_eof()
                with anyio.move_on_after(END_TIMEOUT):  # it drops the stream once it has the file, or at once
                    await stream.receive_some()
        except BrokenOffError as error:
            lost = TransferError(str(error))  # with its connection: whether it has the file nobody knows
            dropped = self.peer in self.endpoint.connected_peers()  # a reset: it has not read to the end
            raise (self.drops.bear(error, lost) if dropped else lost) from error
        return self.progress.moved_in_all

    async def _headed(self, stream: Stream) -> None:
        await send_message(stream, to_cbor(PushHeader, telemetry.with_trace(self.header)))
        answer = from_cbor(PushAnswer, await receive_message(stream))
        if isinstance(answer, Refusal):
            raise TransferRefusedError(answer.reason)
        size = self.header.size
        if answer.offset > size:
            raise TransferError(f"asked to go on from byte {answer.offset} of {size}")
        if self.path.stat().st_size != size:
            raise TransferError(
                f"{self.path} has changed: {self.path.stat().st_size} bytes are not the {size} announced"
            )
        self.progress.begin(answer.offset, size)
        await send_file(stream, self.path, answer.offset, size, self.progress)
        await stream.send_eof()
        receipt = from_cbor(PushReceipt, await receive_message(stream))
        if isinstance(receipt, Refusal):
            raise TransferRefusedError(receipt.reason)


# ------------------------------------------------------------------------------------------------------------ receiving


def serve_pushes(endpoint: Endpoint, accept: Accept) -> None:
    """Take files that peers push, where `accept(peer, header)` lets them land.

    `header` is none for a peer of the old wire: its PeerId is all that is known. A file is written beside its landing
    place and renamed only when it is whole and its digest is right. What a broken push has brought waits there, and the
    next push of the same content into the same folder goes on from it.
    """

    async def headed(stream: Stream) -> None:
        async with ending(stream, f"push from {stream.peer}"):
            header: PushHeader = from_cbor(PushHeader, await receive_message(stream))
            about: dict[str, telemetry.Value] = {"hypha.peer.id": str(stream.peer), "hypha.round": header.round}
            with telemetry.serving(f"receive {header.kind[:40]}", header, about):
                landing = await accept(stream.peer, header)
                if isinstance(landing, Landing) and header.size > landing.max_bytes:
                    landing = Refusal(reason=f"{header.size} bytes are over the limit of {landing.max_bytes}")
                if isinstance(landing, Refusal):
                    await refuse(stream, PushAnswer, landing)
                    return
                async with _holding(landing, header, stream.peer) as holder:
                    await _land(endpoint, stream, landing, header, holder)

    async def bare(stream: Stream) -> None:
        async with ending(stream, f"push from {stream.peer}"):
            landing = await accept(stream.peer, None)
            if isinstance(landing, Refusal):
                raise TransferRefusedError(landing.reason)
            progress = Progress(endpoint, stream.peer, landing.path.name, "received")
            with progress.told():
                async with arriving_at(landing.path, None, None) as arriving:
                    progress.begin(0, None)
                    size, digest = await receive_whole(stream, arriving, landing.max_bytes, progress)
                await landing.arrived(size, digest)

    turns = Turns(AT_ONCE)
    endpoint.handle(PUSH_WITH_HEADER, guarded(headed, turns))
    endpoint.handle(PUSH, guarded(bare, turns))


async def _land(endpoint: Endpoint, stream: Stream, landing: Landing, header: PushHeader, holder: _Holder) -> None:
    progress = Progress(endpoint, stream.peer, header.name[:200], "received")
    try:
        with progress.told():
            size = await _take(stream, landing, header, progress, holder)
    except (StreamResetError, BrokenOffError):
        raise
    except (TransferError, OSError) as error:
        _log.warning("push of %s from %s refused: %s", header.name[:200], stream.peer, error)
        reason = error.reason if isinstance(error, TransferRefusedError) else str(error)
        await refuse(stream, PushReceipt, Refusal(reason=reason))
        return
    await send_message(stream, to_cbor(PushReceipt, Receipt(size=size)))
    await stream.send_eof()


async def _take(stream: Stream, landing: Landing, header: PushHeader, progress: Progress, holder: _Holder) -> int:
    async with arriving_at(landing.path, header.size, header.digest) as arriving:
        await send_message(stream, to_cbor(PushAnswer, GoOn(offset=arriving.received)))
        progress.begin(arriving.received, header.size)
        size, digest = await receive_whole(stream, arriving, landing.max_bytes, progress)
    holder.let_go()
    await landing.arrived(size, digest)
    return size


_Place = Path | tuple[PeerId, str]
_holders: dict[_Place, _Holder] = {}


@dataclass(slots=True, eq=False)
class _Holder:
    """A push that is writing a file."""

    peer: PeerId
    place: _Place
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    gone: anyio.Event = field(default_factory=anyio.Event)

    def let_go(self) -> None:
        """The file is whole: what is done with it now is not given up for another push. Idempotent."""
        self.gone.set()
        if _holders.get(self.place) is self:
            del _holders[self.place]


@asynccontextmanager
async def _holding(landing: Landing, header: PushHeader, peer: PeerId) -> AsyncIterator[_Holder]:
    """Take over from a push by the same peer, of the same content or into the same slot, which this one replaces.

    Its connection is dead, most often: the node may notice that half a minute after the peer, and until then the file
    would be locked.
    """
    path, slot = landing.path, landing.slot
    place: _Place = (peer, slot) if slot is not None else path.with_name(waiting_name(header.digest) or path.name)
    before = _holders.get(place)
    if before is not None and before.peer == peer:
        _log.info("%s pushes %s: the push before it is given up", peer, header.name[:200])
        before.scope.cancel()
        with anyio.move_on_after(_TAKE_OVER):
            await before.gone.wait()
    holder = _Holder(peer, place)
    _holders.setdefault(place, holder)
    try:
        with holder.scope:
            yield holder
        if holder.scope.cancelled_caught:
            raise BrokenOffError(f"{peer} pushes anew")
    finally:
        holder.let_go()
