"""Length-delimited protobuf messages on a stream: each after its length as an unsigned varint.

The framing of the DHT, relay and DCUtR protocols; used by `kad`, `relay` and `gossipsub`. Varints:
https://github.com/multiformats/unsigned-varint
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError
from libp2p.utils.varint import encode_varint_prefixed

from hypha_net.endpoint import Stream
from hypha_net.errors import TransferError

MAX_MESSAGE: Final = 1 << 20


class TooLongError(TransferError):
    """A message exceeds the size limit."""


async def write_message(stream: Stream, message: Any) -> None:
    """Send a message after its length."""
    await stream.send_all(encode_varint_prefixed(message.SerializeToString()))


async def read_message(stream: Stream, kind: Any, limit: int = MAX_MESSAGE) -> Any:
    """Read one message of class `kind` and no byte after it. Return None at the clean end of the stream.

    Raises:
        TooLongError: the message exceeds `limit` bytes.
        TransferError: the message is truncated or malformed.
    """
    prefix = bytearray()
    while (found := _parse_length(prefix, limit)) is None:
        byte = await stream.receive_some(1)
        if not byte and prefix:
            raise TransferError("the stream ended within a message")
        if not byte:
            return None
        prefix += byte
    _, size = found
    data = bytearray()
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise TransferError("the stream ended within a message")
        data += part
    return _parse(stream, kind, data)


class MessageReader:
    """Reads messages from a stream that carries nothing else, with buffering: one read may bring many."""

    def __init__(self, stream: Stream, kind: Any, limit: int = MAX_MESSAGE) -> None:
        self._stream = stream
        self._kind = kind
        self._limit = limit
        self._buffer = bytearray()

    async def next(self) -> Any:
        """Return the next message; None at the clean end of the stream. Raises as `read_message`."""
        while (found := _parse_length(self._buffer, self._limit)) is None or len(self._buffer) < sum(found):
            part = await self._stream.receive_some(64 << 10)
            if not part:
                if self._buffer:
                    raise TransferError("the stream ended within a message")
                return None
            self._buffer += part
        start, size = found
        data = self._buffer[start : start + size]
        del self._buffer[: start + size]
        return _parse(self._stream, self._kind, data)


def _parse_length(data: bytearray, limit: int) -> tuple[int, int] | None:
    """Return the size of the length prefix and the length; None while the prefix is incomplete."""
    size = 0
    for index, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if size > limit:
                raise TooLongError(f"a message of {size} bytes is over the limit of {limit}")
            return index + 1, size
    if len(data) >= 5:
        raise TransferError("a message's length has too many bytes")
    return None


def _parse(stream: Stream, kind: Any, data: bytearray) -> Any:
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise TransferError(f"not a message of {stream.protocol}: {error}") from None
