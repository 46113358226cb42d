"""Push: the sender says what it brings, the receiver from which byte on it wants it, and in the end that it has it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import StreamResetError, TransferError, TransferRefusedError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.transfer.framing import (
    AT_ONCE,
    TransferInterruptedError,
    ending,
    guarded,
    receive_message,
    refuse,
    refused,
    send_message,
)
from hypha_net.transfer.io.partial_buffer import Waiting
from hypha_net.transfer.io.sources import Buffer, Source, source_of
from hypha_net.transfer.io.stream_copy import receive_whole
from hypha_net.transfer.progress import Progress
from hypha_net.transfer.push_slots import PushSlots
from hypha_net.transfer.push_target import FilePushTarget, MemoryPushTarget, PushSink, berth_of
from hypha_net.transfer.retry import Drops, retry_with_deadline
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PUSH, PUSH_WITH_HEADER
from hypha_proto.transfer import GoOn, PushAnswer, PushHeader, PushReceipt, Receipt, Refusal

_log = logging.getLogger("hypha_net.transfer")

RECEIPT_TIMEOUT: Final = 600.0
"""Seconds for what the peer does with a file before it says that it has it; one that is dead is noticed sooner."""
END_TIMEOUT: Final = 5.0
"""Seconds that a peer of the old wire may take to end the stream, once it has the file, before it is believed to."""


Accept = Callable[[PeerId, PushHeader | None], Awaitable[FilePushTarget | MemoryPushTarget | Refusal]]


async def push(
    endpoint: Endpoint, peer: PeerId, content: Path | Buffer, header: PushHeader, *, timeout: float = 600.0
) -> int:
    """Push a file or a buffer to `peer` and wait for its receipt; returns the bytes sent, repeated ones included.

    Size and digest for the header come from `describe`. A buffer must stay as it is meanwhile.

    A push that breaks off is taken up again a few times, from where the peer has it. Falls back to the old wire's push,
    which has neither header nor receipt, and is repeated only where the peer dropped the stream unread.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not take this, and says why.
        TransferError: the stream broke off, the peer's answers make no sense, or `timeout` seconds have passed.
        OSError: the file cannot be read.
    """
    outgoing = _Outgoing(endpoint, peer, source_of(content), header)
    return await retry_with_deadline(outgoing.attempt, outgoing.what, outgoing.progress, timeout)


@dataclass(slots=True)
class _Outgoing:
    endpoint: Endpoint
    peer: PeerId
    source: Source
    header: PushHeader
    progress: Progress = field(init=False)
    drops: Drops = field(default_factory=Drops)

    def __post_init__(self) -> None:
        self.progress = Progress(self.endpoint, self.peer, self.header.name, "sent")

    @property
    def what(self) -> str:
        return f"push of {self.header.name} to {self.peer}"

    async def attempt(self) -> int:
        stream = await self.drops.open_stream(self.endpoint, self.peer, [PUSH_WITH_HEADER, PUSH])
        if stream.protocol == PUSH:
            return await self._bare(stream)
        async with ending(stream, self.what):
            await self._headed(stream)
        return self.progress.moved_in_all

    async def _bare(self, stream: Stream) -> int:
        try:
            async with ending(stream, self.what):
                size = self.source.measure()
                self.progress.begin(0, size)
                await self.source.send(stream, 0, size, self.progress)
                await stream.send_eof()
                with anyio.move_on_after(END_TIMEOUT):  # it drops the stream once it has the file, or at once
                    await stream.receive_some()
        except TransferInterruptedError as error:
            lost = TransferError(str(error))  # with its connection: whether it has the file nobody knows
            dropped = self.peer in self.endpoint.connected_peers()  # a reset: it has not read to the end
            raise (self.drops.bear(error, lost) if dropped else lost) from error
        return self.progress.moved_in_all

    async def _headed(self, stream: Stream) -> None:
        await send_message(stream, to_cbor(PushHeader, instrumentation.with_trace(self.header)))
        answer = from_cbor(PushAnswer, await receive_message(stream))
        if isinstance(answer, Refusal):
            raise refused(answer)
        size = self.header.size
        if answer.offset > size:
            raise TransferError(f"asked to go on from byte {answer.offset} of {size}")
        if (there := self.source.measure()) != size:
            raise TransferError(f"{self.source} has changed: {there} bytes are not the {size} announced")
        self.progress.begin(answer.offset, size)
        await self.source.send(stream, answer.offset, size, self.progress)
        await stream.send_eof()
        receipt = from_cbor(PushReceipt, await receive_message(stream, RECEIPT_TIMEOUT))
        if isinstance(receipt, Refusal):
            raise refused(receipt)


# ------------------------------------------------------------------------------------------------------------ receiving


def serve_pushes(endpoint: Endpoint, accept: Accept) -> None:
    """Take what peers push, where `accept(peer, header)` lets it land: in a file or in memory.

    `header` is none for a peer of the old wire: its PeerId is all that is known. A file is written beside its landing
    place and renamed only when it is whole and its digest is right. What a broken push has brought waits there, and the
    next push of the same content into the same folder goes on from it; in memory it waits for half a minute.
    """
    holders, waiting = PushSlots(), Waiting()

    async def headed(stream: Stream) -> None:
        async with ending(stream, f"push from {stream.peer}"):
            header: PushHeader = from_cbor(PushHeader, await receive_message(stream))
            about: dict[str, instrumentation.Value] = {"hypha.peer.id": str(stream.peer), "hypha.round": header.round}
            with instrumentation.serving(f"receive {header.kind[:40]}", header, about):
                landing = await accept(stream.peer, header)
                if not isinstance(landing, Refusal) and header.size > landing.max_bytes:
                    landing = Refusal(reason=f"{header.size} bytes are over the limit of {landing.max_bytes}")
                if isinstance(landing, Refusal):
                    await refuse(stream, PushAnswer, landing)
                    return
                berth = berth_of(landing, stream.peer, waiting)
                async with holders.holding(berth.place(header), header.name[:200]) as let_go:
                    await _land(endpoint, stream, berth, header, let_go)

    async def bare(stream: Stream) -> None:
        async with ending(stream, f"push from {stream.peer}"):
            landing = await accept(stream.peer, None)
            if isinstance(landing, Refusal):
                raise TransferRefusedError(landing.reason)
            berth = berth_of(landing, stream.peer, waiting)
            progress = Progress(endpoint, stream.peer, berth.name, "received")
            with progress.told():
                async with berth.arriving(None, None) as arriving:
                    progress.begin(0, None)
                    size, digest = await receive_whole(stream, arriving, berth.max_bytes, progress)
                await berth.arrived(size, digest)

    turns = PerPeerLimiter(AT_ONCE)
    in_turn = guarded(headed, turns)

    async def headed_then_tidied(stream: Stream) -> None:
        await in_turn(stream)
        await waiting.expire()  # out of its turn: the peer may be back by now

    endpoint.handle(PUSH_WITH_HEADER, headed_then_tidied)
    endpoint.handle(PUSH, guarded(bare, turns))


async def _land(
    endpoint: Endpoint, stream: Stream, berth: PushSink, header: PushHeader, let_go: Callable[[], None]
) -> None:
    progress = Progress(endpoint, stream.peer, header.name[:200], "received")
    try:
        with progress.told():
            size = await _take(stream, berth, header, progress, let_go)
    except (StreamResetError, TransferInterruptedError):
        raise
    except (TransferError, OSError) as error:
        _log.warning("push of %s from %s refused: %s", header.name[:200], stream.peer, error)
        reason = error.reason if isinstance(error, TransferRefusedError) else str(error)
        await refuse(stream, PushReceipt, Refusal(reason=reason))
        return
    await send_message(stream, to_cbor(PushReceipt, Receipt(size=size)))
    await stream.send_eof()


async def _take(
    stream: Stream, berth: PushSink, header: PushHeader, progress: Progress, let_go: Callable[[], None]
) -> int:
    async with berth.arriving(header.size, header.digest) as arriving:
        await send_message(stream, to_cbor(PushAnswer, GoOn(offset=arriving.received)))
        progress.begin(arriving.received, header.size)
        size, digest = await receive_whole(stream, arriving, berth.max_bytes, progress)
    let_go()
    await berth.arrived(size, digest)
    return size
