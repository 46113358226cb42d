"""multistream-select (``/multistream/1.0.0``): agree on the protocol of a stream.

py-libp2p's negotiation takes two round trips where one suffices, and answers in a frame for each line. Here the dialler
sends greeting, protocol and optionally all of its request together, and the listener answers together what has arrived
together. Other implementations see an ordinary negotiation, in which lines may arrive at once.

Specification: https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from hypha_net._libp2p.yamux.stream import YamuxStream

GREETING: Final = b"/multistream/1.0.0"
NOT_AVAILABLE: Final = b"na"
MAX_LINE: Final = 1024
"""Bytes of a line, with its newline."""
MAX_LINES: Final = 64
"""Protocols that a dialler may propose on one stream."""


class NoMultistreamError(Exception):
    """The peer does not speak multistream-select."""


class ProtocolNotSupportedError(Exception):
    """The peer supports none of the proposed protocols."""


async def negotiate_outbound(stream: YamuxStream, protocols: Sequence[str], early_data: bytes | None = None) -> str:
    """Propose protocols in order; return the first that the peer supports.

    Args:
        early_data: the whole request, sent with the proposal and the end of this side. For a single protocol only.

    Raises:
        ProtocolNotSupportedError: the peer supports none of them.
        NoMultistreamError: it answers something else.
        MuxedStreamEOF, MuxedStreamError: it ends the stream, or the connection breaks off.
    """
    greeting = _line(GREETING)
    for protocol in protocols:
        lines = greeting + _line(protocol.encode())
        if early_data is None:
            await stream.write(lines)
        else:
            await stream.write(lines + early_data, end=True)
        if greeting:
            await _expect_greeting(stream)
            greeting = b""
        answer = await _read_line(stream)
        if answer == protocol.encode():
            return protocol
        if answer != NOT_AVAILABLE:
            raise NoMultistreamError(f"{answer!r} in answer to {protocol}")
    raise ProtocolNotSupportedError(", ".join(protocols))


async def negotiate_inbound(stream: YamuxStream, supported: Container[str]) -> str | None:
    """Answer a dialler's proposals until one is supported and return it; None if the dialler gives up.

    Raises:
        NoMultistreamError: it does not speak multistream-select, or proposes more than `MAX_LINES` protocols.
        MuxedStreamError: it resets the stream, or the connection breaks off.
    """
    if not stream.readable:  # a dialler may wait for the greeting before it sends anything
        await stream.write(_line(GREETING))
        unsent = b""
    else:
        unsent = _line(GREETING)
    try:
        await _expect_greeting(stream)
        for proposed in range(MAX_LINES):
            if unsent and not stream.readable:
                await stream.write(unsent)
                unsent = b""
            try:
                line = await _read_line(stream)
            except NoMultistreamError:
                if proposed:
                    return None  # early data after a protocol that is not supported
                raise
            protocol = line.decode(errors="replace")
            answer, unsent = unsent + _line(line if protocol in supported else NOT_AVAILABLE), b""
            await stream.write(answer)
            if protocol in supported:
                return protocol
    except MuxedStreamEOF:
        return None
    raise NoMultistreamError(f"over {MAX_LINES} lines")


def _line(text: bytes) -> bytes:
    """Frame a line: its length with the newline as an unsigned varint, then the line."""
    size = len(text) + 1
    return (bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))) + text + b"\n"


async def _expect_greeting(stream: YamuxStream) -> None:
    greeting = await _read_line(stream)
    if greeting != GREETING:
        raise NoMultistreamError(f"{greeting!r} instead of a greeting")


async def _read_line(stream: YamuxStream) -> bytes:
    """Read one line and no byte after it. Raises `MuxedStreamEOF` at the stream's end."""
    size = (await stream.read(1))[0]
    if size >= 0x80:
        size = size & 0x7F | (await stream.read(1))[0] << 7
    if not 0 < size <= MAX_LINE:
        raise NoMultistreamError(f"a line of {size} bytes")
    line = b""
    while len(line) < size:
        line += await stream.read(size - len(line))
    if line[-1:] != b"\n":
        raise NoMultistreamError(f"{line!r} does not end in a newline")
    return line[:-1]
