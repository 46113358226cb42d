"""Server of the pull protocol: announces length and digest of a file or buffer and sends it from the requested byte.

The other side is `pull_client`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.transfer.framing import (
    MAX_CONCURRENT,
    describe_request,
    limited,
    receive_message,
    reset_on_error,
    send_message,
    send_refusal,
)
from hypha_net.transfer.io.sources import Source, describe
from hypha_net.transfer.progress import TransferProgress
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL
from hypha_proto.transfer import PullAnswer, PullRequest, PullStart, Refusal


@dataclass(frozen=True, slots=True)
class PullSource:
    """File or bytes that may be pulled; `digest` (``blake3:…``) is computed when it is not known."""

    source: Path | bytes
    digest: str | None = None
    on_sent: Callable[[], Awaitable[None]] | None = None
    """Called after the last byte, before the end of the stream; raises `TransferError` if the sent bytes are void."""

    async def finish(self, stream: Stream) -> None:
        """End a stream on which all bytes were sent."""
        if self.on_sent is not None:
            await self.on_sent()
        await stream.send_eof()


def serve_pulls(endpoint: Endpoint, resolve: Callable[[PeerId, PullRequest], Awaitable[PullSource | Refusal]]) -> None:
    """Serve files and bytes to peers, as `resolve(peer, request)` returns them."""

    async def serve(stream: Stream) -> None:
        async with reset_on_error(stream, f"pull by {stream.peer}"):
            request: PullRequest = from_cbor(PullRequest, await receive_message(stream))
            with instrumentation.serving("give file", request, {"hypha.peer.id": str(stream.peer)}):
                offered = await resolve(stream.peer, request)
                if isinstance(offered, Refusal):
                    await send_refusal(stream, PullAnswer, offered)
                    return
                await _send(endpoint, stream, request, offered)

    endpoint.handle(PULL, limited(serve, PerPeerLimiter(MAX_CONCURRENT)))


async def _send(endpoint: Endpoint, stream: Stream, request: PullRequest, offered: PullSource) -> None:
    source = Source(offered.source)
    size, digest = await describe(offered.source) if offered.digest is None else (source.size(), offered.digest)
    if request.offset > size:
        reason = f"offset {request.offset} is past the end ({size})"
        await send_refusal(stream, PullAnswer, Refusal(reason=reason))
        return
    progress = TransferProgress(endpoint, stream.peer, describe_request(request), "sent")
    with progress.report_outcome():
        await send_message(stream, to_cbor(PullAnswer, PullStart(size=size, digest=digest)))
        progress.begin(request.offset, size)
        await source.send(stream, request.offset, size, progress)
        await offered.finish(stream)
