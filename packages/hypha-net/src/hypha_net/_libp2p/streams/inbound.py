"""Inbound streams: negotiate a protocol and run its handler.

Replaces the path of a stream through py-libp2p's connection, swarm and host, which starts a dozen tasks for each and
lets an unexpected error end the swarm, and with it every connection (docs/upstream/). Here a peer's input on one
stream ends that stream at most.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream, StreamState
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from hypha_net._libp2p.streams.multistream_select import NoMultistreamError, negotiate_inbound
from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.streams")

NEGOTIATE_TIMEOUT: Final = 10
"""Seconds within which a protocol must be agreed on."""


class ProtocolHandler:
    """Handler of one of our protocols, registered with py-libp2p's host so that identify lists the protocol."""

    def __init__(self, serve: Callable[[Libp2pStream], Awaitable[None]]) -> None:
        self.serve = serve

    async def __call__(self, stream: Any) -> None:
        """Serve a stream of py-libp2p's; its interface, although inbound streams do not take that path."""
        await self.serve(Libp2pStream(stream.muxed_stream, str(stream.get_protocol())))


class InboundStreams:
    """Inbound streams of one endpoint."""

    def __init__(self, handlers: Mapping[Any, Any]) -> None:
        """Serve the protocols in `handlers`: `ProtocolHandler`s, and py-libp2p's own functions."""
        self._handlers = handlers

    async def serve(self, muxed: YamuxStream) -> None:
        """Serve one stream to its end; raises nothing."""
        try:
            protocol = await self._negotiate(muxed)
            if protocol is not None:
                await self._run_handler(muxed, protocol)
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            _log.debug("a stream of %s ended: %s", _peer_of(muxed), error)
        except Exception:  # noqa: BLE001 - it would end the tasks of the connection
            _log.exception("resetting a stream of %s after an unexpected error", _peer_of(muxed))
            with trio.CancelScope(shield=True):
                await muxed.reset()

    async def _negotiate(self, muxed: YamuxStream) -> str | None:
        try:
            with trio.fail_after(NEGOTIATE_TIMEOUT):
                protocol = await negotiate_inbound(muxed, self._handlers)
        except (NoMultistreamError, trio.TooSlowError) as error:
            _log.debug("no protocol agreed on a stream of %s: %s", _peer_of(muxed), str(error) or "timeout")
            await muxed.reset()
            return None
        if protocol is None:
            await muxed.close()
            await muxed.discard()
        return protocol

    async def _run_handler(self, muxed: YamuxStream, protocol: str) -> None:
        handler = self._handlers[protocol]
        if isinstance(handler, ProtocolHandler):
            await handler.serve(Libp2pStream(muxed, protocol))
            return
        stream = NetStream(muxed, None, None)
        await stream.set_state(StreamState.OPEN)
        stream.set_protocol(TProtocol(protocol))
        await handler(stream)


def _peer_of(muxed: YamuxStream) -> PeerId:
    return PeerId(muxed.peer_id.to_bytes())
