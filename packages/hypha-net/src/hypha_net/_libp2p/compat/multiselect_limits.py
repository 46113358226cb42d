"""Lines of multistream-select outside `negotiation`: before there are streams, and on those that py-libp2p opens.

py-libp2p takes a line of any length, a hundred reads of it, before anybody is authenticated, and one that is no text is
an error that it does not expect, which ends the swarm (docs/upstream.md).
"""

from __future__ import annotations

from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from hypha_net._libp2p.streams.multistream_select import MAX_LINE


def contain() -> None:
    """Bound what is read, and make errors of it that py-libp2p knows."""
    MultiselectCommunicator.read = _read_line  # type: ignore[method-assign]


async def _read_line(self: MultiselectCommunicator) -> str:
    """The next line."""
    try:
        line = await read_varint_prefixed_bytes_limited(self.read_writer, MAX_LINE)
    except (ParseError, IOException) as error:
        raise MultiselectCommunicatorError(f"the other side ended, or sent no line: {error}") from error
    if line[-1:] != b"\n":
        raise MultiselectCommunicatorError(f"{line[:80]!r} is no line")
    try:
        return line[:-1].decode()
    except UnicodeDecodeError as error:
        raise MultiselectCommunicatorError("a protocol's name is not UTF-8") from error
