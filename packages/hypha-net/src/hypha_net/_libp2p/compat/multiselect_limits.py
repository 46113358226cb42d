"""Limits on multistream-select lines in py-libp2p's own negotiation: of security and muxer, and of its own streams.

py-libp2p reads a line of any length in up to a hundred reads before the peer is authenticated, and raises an unexpected
error for one that is not UTF-8, which ends the swarm (docs/upstream/). Our streams use `streams.multistream_select`.
"""

from __future__ import annotations

from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from hypha_net._libp2p.streams.multistream_select import MAX_LINE


def limit_multiselect_lines() -> None:
    """Replace `MultiselectCommunicator.read` by one that limits lines and raises errors that py-libp2p expects."""
    MultiselectCommunicator.read = _read_line  # type: ignore[method-assign]


async def _read_line(self: MultiselectCommunicator) -> str:
    """Read one line of at most `MAX_LINE` bytes."""
    try:
        line = await read_varint_prefixed_bytes_limited(self.read_writer, MAX_LINE)
    except (ParseError, IOException) as error:
        raise MultiselectCommunicatorError(f"the peer ended the stream, or sent no line: {error}") from error
    if line[-1:] != b"\n":
        raise MultiselectCommunicatorError(f"{line!r} does not end in a newline")
    try:
        return line[:-1].decode()
    except UnicodeDecodeError as error:
        raise MultiselectCommunicatorError("a protocol's name is not UTF-8") from error
