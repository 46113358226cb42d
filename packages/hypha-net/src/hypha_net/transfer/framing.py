"""Headers of the transfer protocols, each after its length (8 bytes, little-endian), and the end of their streams."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio

from hypha_net.endpoint import Stream, receive_up_to
from hypha_net.errors import StreamClosedError, StreamResetError, TransferError, TransferRefusedError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_proto.codec import to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.texts import shorten
from hypha_proto.transfer import MAX_HEADER, PullRequest, Refusal

_log = logging.getLogger("hypha_net.transfer")

IDLE_TIMEOUT: Final = 60.0
"""Seconds without a byte after which a transfer is aborted."""
MAX_CONCURRENT: Final = 32
"""Concurrent transfers served per peer, in each direction; further ones wait."""
MAX_REASON_LENGTH: Final = 1000
"""Characters of a peer's reason that are kept."""


class TransferInterruptedError(TransferError):
    """The stream or its connection broke off, or no bytes moved for too long: another attempt may succeed."""


@asynccontextmanager
async def reset_on_error(stream: Stream, what: str) -> AsyncIterator[None]:
    """Close the stream cleanly on success, reset it on any error; translate the errors that the stream raises."""
    try:
        yield
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await stream.reset()
        if isinstance(error, StreamResetError | StreamClosedError):
            raise TransferInterruptedError(f"{what} broke off: {error}") from error
        if isinstance(error, DecodeError):
            raise TransferError(f"{what}: malformed header: {error}") from error
        raise
    with anyio.CancelScope(shield=True):
        await stream.aclose()


def limited(
    handler: Callable[[Stream], Awaitable[None]], limiter: PerPeerLimiter
) -> Callable[[Stream], Awaitable[None]]:
    """Return a handler that is limited per peer, and logs failed transfers instead of raising."""

    async def handle(stream: Stream) -> None:
        try:
            async with limiter.acquire(stream.peer):
                await handler(stream)
        except (TransferError, OSError) as error:
            _log.warning("%s: %s", stream.peer, error)

    return handle


async def send_refusal(stream: Stream, kind: Any, refusal: Refusal) -> None:
    """Send the reason for a refusal, if the peer still reads; `kind` is the union that the refusal is a member of."""
    with suppress(StreamResetError):
        await send_message(stream, to_cbor(kind, refusal))
        await stream.send_eof()


def refusal_error(refusal: Refusal) -> TransferRefusedError:
    """Return the error for a peer's refusal."""
    return TransferRefusedError(shorten(refusal.reason, MAX_REASON_LENGTH))


def describe_request(request: PullRequest) -> str:
    """Return what a request asks for, for events and errors."""
    return shorten(f"{request.dataset}/{request.name or request.index}", 400)


async def send_message(stream: Stream, data: bytes) -> None:
    """Send the length of a header, then the header."""
    await stream.send_all(len(data).to_bytes(8, "little") + data)


async def receive_message(stream: Stream, timeout: float | None = None) -> bytes:
    """Receive a header within `timeout` seconds, by default `IDLE_TIMEOUT`.

    Raises:
        TransferError: it is truncated, too long, or does not come in time.
    """
    seconds = IDLE_TIMEOUT if timeout is None else timeout
    with anyio.move_on_after(seconds):
        length = int.from_bytes(await _receive_exactly(stream, 8), "little")
        if length > MAX_HEADER:
            raise TransferError(f"a header of {length} bytes is over the limit of {MAX_HEADER}")
        return await _receive_exactly(stream, length)
    raise TransferInterruptedError(f"no header within {seconds:g} s")


async def _receive_exactly(stream: Stream, size: int) -> bytes:
    data = await receive_up_to(stream, size)
    if len(data) < size:
        raise TransferError(f"the stream ended within a header, after {len(data)} of {size} bytes")
    return data
