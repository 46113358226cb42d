"""What a peer says on one stream ends that stream, never the node.

py-libp2p runs every stream's handler in a task of the swarm's own: an error that none of its layers expects ends the
swarm, and with it every connection. A protocol's name that is not UTF-8 is such an error (docs/upstream.md).
"""

from __future__ import annotations

import logging
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.network.swarm import Swarm
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.streams")

_read: Final = MultiselectCommunicator.read


def contain(swarm: Swarm) -> None:
    """Let no stream's error out of its stream."""
    MultiselectCommunicator.read = _read_line  # type: ignore[method-assign]
    serve = swarm.common_stream_handler

    async def guarded(stream: INetStream) -> None:
        try:
            await serve(stream)
        except Exception:  # noqa: BLE001 - the last place before the swarm's own tasks, which it would end
            _log.exception("a stream of %s is broken off", PeerId(stream.muxed_conn.peer_id.to_bytes()))
            with trio.CancelScope(shield=True):
                await stream.reset()

    swarm.set_stream_handler(guarded)


async def _read_line(self: MultiselectCommunicator) -> str:
    """A line of multistream-select; one that is no text is an error that its callers know."""
    try:
        return await _read(self)
    except UnicodeDecodeError as error:
        raise MultiselectCommunicatorError("a protocol's name is not UTF-8") from error
