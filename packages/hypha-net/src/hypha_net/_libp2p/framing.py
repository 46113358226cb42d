"""Protobuf messages on a stream, each behind its length as an unsigned varint: what the DHT and the relay speak."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError

from hypha_net.endpoint import Stream
from hypha_net.errors import TransferError

MAX_MESSAGE: Final = 1 << 20


class TooLongError(TransferError):
    """A message's length is over the limit."""


async def write_message(stream: Stream, message: Any) -> None:
    """Send a message behind its length."""
    data = message.SerializeToString()
    size, prefix = len(data), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    await stream.send_all(bytes(prefix) + data)


async def read_message(stream: Stream, kind: Any, limit: int = MAX_MESSAGE) -> Any:
    """Receive a message of the class `kind` and not a byte of what follows it; none at the clean end of the stream.

    Raises:
        TooLongError: it is over `limit` bytes.
        TransferError: it is cut, or not such a message.
    """
    size = await _read_length(stream)
    if size is None:
        return None
    if size > limit:
        raise TooLongError(f"a message of {size} bytes is over the limit of {limit}")
    data = bytearray()
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise TransferError("the stream ended within a message")
        data += part
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise TransferError(f"not a message of {stream.protocol}: {error}") from None


async def _read_length(stream: Stream) -> int | None:
    size, shift = 0, 0
    while True:
        byte = await stream.receive_some(1)
        if not byte:
            if shift:
                raise TransferError("the stream ended within a message")
            return None
        size |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return size
        if shift > 28:
            raise TransferError("a message's length has too many bytes")
