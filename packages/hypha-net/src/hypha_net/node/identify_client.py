"""Minimal client of libp2p's identify protocol, which reads the agent version of a peer.

Specification: https://github.com/libp2p/specs/blob/master/identify/README.md. Called by `probe` for a peer with this
node's own identity, which the engine does not identify. An answer is one length-prefixed protobuf message; only
its agent version (field 6) is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hypha_net.errors import NetError

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.ids import PeerId

IDENTIFY: Final = "/ipfs/id/1.0.0"
_AGENT_FIELD: Final = 6
_LENGTH_DELIMITED: Final = 2
_LIMIT: Final = 64 << 10
_AGENT_LIMIT: Final = 200


async def ask_agent(endpoint: Endpoint, peer: PeerId, timeout: float) -> str:
    """Return the agent version of a peer; empty if it does not send one.

    Args:
        timeout: seconds for the whole answer.
    """
    import anyio

    answer = b""
    with anyio.move_on_after(timeout):
        try:
            stream = await endpoint.open_stream(peer, (IDENTIFY,), timeout=timeout)
            try:
                while len(answer) < _LIMIT and (part := await stream.receive_some()):
                    answer += part
            finally:
                await stream.aclose()
        except NetError:
            return ""
    return read_agent(answer)


def read_agent(answer: bytes) -> str:
    """Return the agent version in an identify answer; empty if there is none or the answer is malformed."""
    try:
        _, at = _varint(answer, 0)  # the length of the message; the end of the stream delimits it as well
        while at < len(answer):
            tag, at = _varint(answer, at)
            if tag & 7 != _LENGTH_DELIMITED:
                return ""  # identify has length-delimited fields only
            size, at = _varint(answer, at)
            if tag >> 3 == _AGENT_FIELD:
                return answer[at : at + size][:_AGENT_LIMIT].decode(errors="replace")
            at += size
    except IndexError:
        return ""
    return ""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a protobuf varint; return it and the position after it. Raises IndexError if the data are truncated."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
