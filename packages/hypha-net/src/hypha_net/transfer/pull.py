"""Pull: the receiver says what it wants and from which byte on, the giver how long it is and what it hashes to."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import TransferError, TransferRefusedError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.transfer.framing import (
    AT_ONCE,
    TransferInterruptedError,
    behind_length,
    ending,
    guarded,
    receive_message,
    refuse,
    refused,
    send_message,
)
from hypha_net.transfer.io.sinks import FileSink, MemorySink, Sink
from hypha_net.transfer.io.sources import Buffer, source_of
from hypha_net.transfer.io.stream_copy import receive_whole
from hypha_net.transfer.progress import Progress
from hypha_net.transfer.retry import Drops, retry_with_deadline
from hypha_proto.codec import from_cbor, from_json, to_cbor, to_json
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL, PULL_WITH_HEADER
from hypha_proto.transfer import PullAnswer, PullHeader, PullRequest, PullStart, Refusal

_log = logging.getLogger("hypha_net.transfer")


@dataclass(frozen=True, slots=True)
class PullResult:
    """A file that has arrived."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class PullSource:
    """A file or a buffer that may be pulled; `digest` (``blake3:…``) is computed when it is not known."""

    source: Path | Buffer
    """A buffer stays as it is while it is offered."""
    digest: str | None = None


async def pull(
    endpoint: Endpoint,
    peer: PeerId,
    request: PullRequest,
    target: Path,
    *,
    max_bytes: int = 1 << 40,
    digest: str | None = None,
    timeout: float = 600.0,
) -> PullResult:
    """Pull a file from `peer` to `target`, which appears only when it is whole.

    A pull that breaks off is taken up again a few times, from where it was; what an earlier call left beside `target`
    counts too, if the peer still has the same content. Peers of the old wire are asked once, for all of it, and again
    only where they dropped the stream before a byte of it came.

    Args:
        digest: what it must hash to; from a peer of the old wire nothing else vouches for it.
        max_bytes: more than this is not taken.
        timeout: seconds for all of it.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not give the file, and says why.
        TransferError: cut, wrong length or digest, too large, no room, or too slow.
        OSError: the file cannot be written.
    """
    incoming = _Incoming(endpoint, peer, request, FileSink(target), max_bytes, digest)
    return await retry_with_deadline(incoming.attempt, incoming.what, incoming.progress, timeout)


async def pull_bytes(
    endpoint: Endpoint,
    peer: PeerId,
    request: PullRequest,
    *,
    max_bytes: int,
    digest: str | None = None,
    timeout: float = 600.0,
) -> bytearray:
    """Pull from `peer` into memory, as `pull` does into a file; the bytes are the caller's.

    A pull that breaks off goes on where it was, within this call. It takes the memory of what has come, and no more
    than `max_bytes` and two blocks.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not give this, and says why.
        TransferError: cut, wrong length or digest, too large, no memory, or too slow.
    """
    into = MemorySink()
    incoming = _Incoming(endpoint, peer, request, into, max_bytes, digest)
    await retry_with_deadline(incoming.attempt, incoming.what, incoming.progress, timeout)
    return into.data


@dataclass(slots=True)
class _Incoming:
    endpoint: Endpoint
    peer: PeerId
    request: PullRequest
    into: Sink
    max_bytes: int
    wanted: str | None
    known: str | None = None
    """Digest of what the peer has, once it has said so."""
    anew: bool = False
    """Whether what is there cannot be gone on from."""
    progress: Progress = field(init=False)
    drops: Drops = field(default_factory=Drops)

    def __post_init__(self) -> None:
        self.known = self.wanted
        self.progress = Progress(self.endpoint, self.peer, _name(self.request), "received")

    @property
    def what(self) -> str:
        return f"pull of {_name(self.request)} from {self.peer}"

    async def attempt(self) -> PullResult:
        offset = 0 if self.anew else await self.into.left_behind(self.known)
        stream = await self.drops.open_stream(self.endpoint, self.peer, [PULL_WITH_HEADER, PULL])
        if stream.protocol == PULL:
            return await self._bare(stream)
        async with ending(stream, self.what):
            return await self._headed(stream, offset)

    async def _bare(self, stream: Stream) -> PullResult:
        try:
            async with ending(stream, self.what):
                if self.request.name is not None:
                    raise TransferRefusedError(f"the peer serves slices only, and no {self.request.name}")
                header = PullHeader(dataset=self.request.dataset, index=self.request.index)
                # an old peer drops the stream after the file's last byte, which is a reset unless it has seen our end:
                # a small file is on its way before an end that follows the header
                await stream.send_eof(behind_length(to_json(PullHeader, header)))
                return await self._receive(stream, None, self.wanted, 0)
        except TransferInterruptedError as error:
            cut = TransferError(str(error))  # an old peer would send all of it again
            raise (cut if self.progress.moved_in_all else self.drops.bear(error, cut)) from error

    async def _headed(self, stream: Stream, offset: int) -> PullResult:
        request = instrumentation.with_trace(_from(self.request, offset))
        await send_message(stream, to_cbor(PullRequest, request))
        await stream.send_eof()
        answer = from_cbor(PullAnswer, await receive_message(stream))
        if isinstance(answer, Refusal):
            if not offset:
                raise refused(answer)
            self.anew = True  # it may have become shorter than what is here of it
            raise TransferInterruptedError(f"{self.what} cannot go on at byte {offset}: {refused(answer)}")
        self._check(answer, offset)
        return await self._receive(stream, answer.size, answer.digest, offset)

    def _check(self, answer: PullStart, offset: int) -> None:
        if answer.size > self.max_bytes:
            raise TransferError(f"{answer.size} bytes are over the limit of {self.max_bytes}")
        if self.wanted is not None and answer.digest != self.wanted:
            raise TransferError(f"the peer has {answer.digest} where {self.wanted} is wanted")
        before, self.known = self.known, answer.digest
        if offset and answer.digest != before:
            raise TransferInterruptedError(f"{self.what}: the file has changed there since {offset} bytes of it came")

    async def _receive(self, stream: Stream, size: int | None, digest: str | None, offset: int) -> PullResult:
        async with self.into.arriving(size, digest) as arriving:
            if arriving.received != offset:
                self.anew = arriving.received == 0
                raise TransferInterruptedError(f"{self.what} can go on at byte {arriving.received}, not {offset}")
            self.progress.begin(offset, size)
            return PullResult(*await receive_whole(stream, arriving, self.max_bytes, self.progress))


def _from(request: PullRequest, offset: int) -> PullRequest:
    return PullRequest(
        dataset=request.dataset,
        index=request.index,
        name=request.name,
        offset=offset,
        traceparent=request.traceparent,
    )


def _name(request: PullRequest) -> str:
    return f"{request.dataset[:200]}/{(request.name or str(request.index))[:200]}"


# --------------------------------------------------------------------------------------------------------------- giving


def serve_pulls(endpoint: Endpoint, resolve: Callable[[PeerId, PullRequest], Awaitable[PullSource | Refusal]]) -> None:
    """Give files and buffers to peers, as `resolve(peer, request)` finds them, over both protocols."""

    async def headed(stream: Stream) -> None:
        async with ending(stream, f"pull by {stream.peer}"):
            request: PullRequest = from_cbor(PullRequest, await receive_message(stream))
            with instrumentation.serving("give file", request, {"hypha.peer.id": str(stream.peer)}):
                offered = await resolve(stream.peer, request)
                if isinstance(offered, Refusal):
                    await refuse(stream, PullAnswer, offered)
                    return
                await _give(endpoint, stream, request, offered)

    async def bare(stream: Stream) -> None:
        async with ending(stream, f"pull by {stream.peer}"):
            header: PullHeader = from_json(PullHeader, await receive_message(stream))
            request = PullRequest(dataset=header.dataset, index=header.index)
            offered = await resolve(stream.peer, request)
            if isinstance(offered, Refusal):
                raise TransferRefusedError(offered.reason)
            source = source_of(offered.source)
            size = source.measure()
            progress = Progress(endpoint, stream.peer, _name(request), "sent")
            with progress.told():
                progress.begin(0, size)
                await source.send(stream, 0, size, progress)
                await stream.send_eof()

    turns = PerPeerLimiter(AT_ONCE)
    endpoint.handle(PULL_WITH_HEADER, guarded(headed, turns))
    endpoint.handle(PULL, guarded(bare, turns))


async def _give(endpoint: Endpoint, stream: Stream, request: PullRequest, offered: PullSource) -> None:
    source = source_of(offered.source)
    size, digest = await source.describe() if offered.digest is None else (source.measure(), offered.digest)
    if request.offset > size:
        reason = f"offset {request.offset} is past the end ({size})"
        await refuse(stream, PullAnswer, Refusal(reason=reason))
        return
    progress = Progress(endpoint, stream.peer, _name(request), "sent")
    with progress.told():
        await send_message(stream, to_cbor(PullAnswer, PullStart(size=size, digest=digest)))
        progress.begin(request.offset, size)
        await source.send(stream, request.offset, size, progress)
        await stream.send_eof()
