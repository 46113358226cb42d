"""Streams that peers open: agreed upon, and given to whoever serves their protocol. After `muxer`, before `engine`.

Stands in for the stream's way through py-libp2p's connection, swarm and host, which starts a dozen tasks for each and
lets an error that it does not expect end the swarm, and with it every connection (docs/upstream.md). Here whatever a
peer says on one stream ends that stream, never the node.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream, StreamState
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from hypha_net._libp2p.streams.multistream_select import NoMultistreamError, agree
from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.streams")

NEGOTIATE_TIMEOUT: Final = 10
"""Seconds within which a peer must have said which protocol it wants."""


class OwnHandler:
    """Serves a protocol of ours; registered with py-libp2p's host, so that identify names the protocol."""

    def __init__(self, serve: Callable[[Libp2pStream], Awaitable[None]]) -> None:
        self.serve = serve

    async def __call__(self, stream: Any) -> None:
        """What py-libp2p would call; its streams do not come that way."""
        await self.serve(Libp2pStream(stream.muxed_stream, str(stream.get_protocol())))


class Inbound:
    """The streams of one endpoint."""

    def __init__(self, handlers: Mapping[Any, Any]) -> None:
        self._handlers = handlers

    async def serve(self, muxed: YamuxStream) -> None:
        """Serve one stream to its end; raises nothing."""
        try:
            protocol = await self._agree(muxed)
            if protocol is not None:
                await self._hand_over(muxed, protocol)
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            _log.debug("a stream of %s ended: %s", PeerId(muxed.muxer.peer_id.to_bytes()), error)
        except Exception:  # noqa: BLE001 - the last place before the connection's own tasks, which it would end
            _log.exception("a stream of %s is broken off", PeerId(muxed.muxer.peer_id.to_bytes()))
            with trio.CancelScope(shield=True):
                await muxed.reset()

    async def _agree(self, muxed: YamuxStream) -> str | None:
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT):
                protocol = await agree(muxed, self._handlers)
        except (NoMultistreamError, trio.TooSlowError) as error:
            peer = PeerId(muxed.muxer.peer_id.to_bytes())
            _log.debug("a stream of %s names no protocol: %s", peer, str(error) or "too slow")
            await muxed.reset()
            return None
        if protocol is None:
            await muxed.close()
            await muxed.discard()
        return protocol

    async def _hand_over(self, muxed: YamuxStream, protocol: str) -> None:
        handler = self._handlers[protocol]
        if isinstance(handler, OwnHandler):
            await handler.serve(Libp2pStream(muxed, protocol))
            return
        stream = NetStream(muxed, None, None)
        await stream.set_state(StreamState.OPEN)
        stream.set_protocol(TProtocol(protocol))
        await handler(stream)
