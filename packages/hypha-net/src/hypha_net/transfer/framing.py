"""What both ends of a transfer say besides the file's bytes, and how its stream ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import anyio

from hypha_net.endpoint import Stream
from hypha_net.errors import StreamClosedError, StreamResetError, TransferError, TransferRefusedError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_proto.codec import to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.transfer import MAX_HEADER, Refusal

_log = logging.getLogger("hypha_net.transfer")

IDLE_TIMEOUT: Final = 60.0
"""Seconds without a byte after which a transfer is given up."""
AT_ONCE: Final = 32
"""Transfers that one peer may have under way, in each direction; the others wait."""
MAX_REASON: Final = 1000
"""Characters of a peer's reason that are believed to be one."""


class TransferInterruptedError(TransferError):
    """The stream or its connection broke off, or nothing moved for too long: trying again may help."""


@asynccontextmanager
async def ending(stream: Stream, what: str) -> AsyncIterator[None]:
    """Close the stream cleanly after success, reset it after anything else; translate what the stream raises."""
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


def guarded(handler: Callable[[Stream], Awaitable[None]], turns: PerPeerLimiter) -> Callable[[Stream], Awaitable[None]]:
    """A handler that takes turns, and tells of failed transfers in the log instead of raising."""

    async def handle(stream: Stream) -> None:
        try:
            async with turns.acquire(stream.peer):
                await handler(stream)
        except (TransferError, OSError) as error:
            _log.warning("%s: %s", stream.peer, error)

    return handle


async def refuse(stream: Stream, kind: Any, refusal: Refusal) -> None:
    """Say why not, if the peer still listens; `kind` is the union that the refusal stands for."""
    with suppress(StreamResetError):
        await send_message(stream, to_cbor(kind, refusal))
        await stream.send_eof()


def refused(refusal: Refusal) -> TransferRefusedError:
    """The error for a peer's refusal."""
    return TransferRefusedError(refusal.reason[:MAX_REASON])


async def send_message(stream: Stream, data: bytes) -> None:
    """Send a header behind its length."""
    await stream.send_all(behind_length(data))


def behind_length(data: bytes) -> bytes:
    """A header as it is sent."""
    return len(data).to_bytes(8, "little") + data


async def receive_message(stream: Stream, within: float | None = None) -> bytes:
    """Receive a header, `within` so many seconds or `IDLE_TIMEOUT`.

    Raises:
        TransferError: it is cut, too long, or does not come.
    """
    seconds = IDLE_TIMEOUT if within is None else within
    with anyio.move_on_after(seconds):
        length = int.from_bytes(await _receive_exactly(stream, 8), "little")
        if length > MAX_HEADER:
            raise TransferError(f"a header of {length} bytes is over the limit of {MAX_HEADER}")
        return await _receive_exactly(stream, length)
    raise TransferInterruptedError(f"no header within {seconds:g} s")


async def _receive_exactly(stream: Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise TransferError(f"the stream ended within a header, after {len(data)} of {size} bytes")
        data += part
    return bytes(data)
