"""multistream-select on streams: which protocol one speaks. Before `streams`, which knows that already.

py-libp2p's takes two round trips where one does, and the answerer a frame for each line. Here the dialler's greeting,
protocol and, if it likes, all that it has to say leave together, and so do the answers to what has come together.
Others see an ordinary negotiation: every implementation allows lines to arrive at once.

The specification: https://github.com/multiformats/multistream-select
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from hypha_net._libp2p.yamux.stream import YamuxStream

GREETING: Final = b"/multistream/1.0.0"
NOT_SPOKEN: Final = b"na"
MAX_LINE: Final = 1024
"""Bytes of a line, its end included."""
MAX_LINES: Final = 64
"""Protocols that a dialler may ask for on one stream."""


class NoMultistreamError(Exception):
    """What comes is not multistream-select."""


class NotSpokenError(Exception):
    """The peer speaks none of the protocols."""


async def propose(stream: YamuxStream, protocols: Sequence[str], said: bytes | None = None) -> str:
    """Offer protocols in order; the first that the peer speaks.

    Args:
        said: sent at once, with the end of this side behind it, where only one protocol is offered.

    Raises:
        NotSpokenError: it speaks none of them.
        NoMultistreamError: it answers something else.
        MuxedStreamEOF, MuxedStreamError: it ends the stream, or the connection breaks off.
    """
    greeting = _line(GREETING)
    for protocol in protocols:
        lines = greeting + _line(protocol.encode())
        if said is None:
            await stream.write(lines)
        else:
            await stream.write(lines + said, end=True)
        if greeting:
            await _expect_greeting(stream)
            greeting = b""
        answer = await _read_line(stream)
        if answer == protocol.encode():
            return protocol
        if answer != NOT_SPOKEN:
            raise NoMultistreamError(f"{answer[:80]!r} in answer to {protocol}")
    raise NotSpokenError(", ".join(protocols))


async def agree(stream: YamuxStream, spoken: Container[str]) -> str | None:
    """Answer a dialler until it asks for a protocol that is spoken here; none if it gives up.

    Raises:
        NoMultistreamError: what it says is not multistream-select, or it asks for too much.
        MuxedStreamError: it resets the stream, or the connection breaks off.
    """
    if not stream.readable:  # it may wait for this before it says anything
        await stream.write(_line(GREETING))
        waiting = b""
    else:
        waiting = _line(GREETING)
    try:
        await _expect_greeting(stream)
        for asked in range(MAX_LINES):
            if waiting and not stream.readable:
                await stream.write(waiting)
                waiting = b""
            try:
                line = await _read_line(stream)
            except NoMultistreamError:
                if asked:
                    return None  # what it would have said, had a protocol fitted
                raise
            protocol = line.decode(errors="replace")
            answer, waiting = waiting + _line(line if protocol in spoken else NOT_SPOKEN), b""
            await stream.write(answer)
            if protocol in spoken:
                return protocol
    except MuxedStreamEOF:
        return None
    raise NoMultistreamError(f"over {MAX_LINES} lines")


def _line(text: bytes) -> bytes:
    size = len(text) + 1
    return (bytes((size,)) if size < 0x80 else bytes((size & 0x7F | 0x80, size >> 7))) + text + b"\n"


async def _expect_greeting(stream: YamuxStream) -> None:
    greeting = await _read_line(stream)
    if greeting != GREETING:
        raise NoMultistreamError(f"{greeting[:80]!r} for a greeting")


async def _read_line(stream: YamuxStream) -> bytes:
    """The next line, and not a byte of what follows it. Raises `MuxedStreamEOF` at the stream's end."""
    size = (await stream.read(1))[0]
    if size >= 0x80:
        size = size & 0x7F | (await stream.read(1))[0] << 7
    if not 0 < size <= MAX_LINE:
        raise NoMultistreamError(f"a line of {size} bytes")
    line = b""
    while len(line) < size:
        line += await stream.read(size - len(line))
    if line[-1:] != b"\n":
        raise NoMultistreamError(f"{line[:80]!r} is no line")
    return line[:-1]
