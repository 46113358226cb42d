"""Asks a peer by libp2p's identify what program it is. `probe` does so where the engine has not: on its own identity.

An answer is one protobuf message with its length before it; of it only the agent version (field 6) is read here.
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
    """The agent version of a peer; empty when it does not say.

    Args:
        timeout: seconds, for the whole answer.
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
    """The agent version in an identify answer; empty when there is none, or the answer makes no sense."""
    try:
        _, at = _varint(answer, 0)  # the length of the message, which the end of the stream tells too
        while at < len(answer):
            tag, at = _varint(answer, at)
            if tag & 7 != _LENGTH_DELIMITED:
                return ""  # identify has no other fields
            size, at = _varint(answer, at)
            if tag >> 3 == _AGENT_FIELD:
                return answer[at : at + size][:_AGENT_LIMIT].decode(errors="replace")
            at += size
    except IndexError:
        return ""
    return ""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises IndexError when the data end before it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
