"""Outbound streams: get a connection, open a stream, negotiate a protocol. The counterpart of `streams.inbound`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import anyio
from libp2p.abc import IPeerStore
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError

from hypha_net._libp2p.dial.dialer import Dialer
from hypha_net._libp2p.identify.peer_metadata import supported_protocols
from hypha_net._libp2p.streams.inbound import NEGOTIATE_TIMEOUT
from hypha_net._libp2p.streams.multistream_select import (
    NoMultistreamError,
    ProtocolNotSupportedError,
    negotiate_outbound,
)
from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.errors import NetError, UnreachableError, UnsupportedProtocolError
from hypha_proto.ids import PeerId


class OutboundStreams:
    """Outbound streams of one endpoint."""

    def __init__(self, dialer: Dialer, peerstore: IPeerStore) -> None:
        self._dialer = dialer
        self._peerstore = peerstore

    async def open(self, peer: PeerId, protocols: Sequence[str], request: bytes | None, timeout: float) -> Libp2pStream:
        """Open a stream; see `Endpoint.open_stream`."""
        with anyio.move_on_after(timeout):
            connection = await self._dialer.get_or_connect(peer)
            try:
                return await self._negotiate(connection, peer, protocols, request)
            except NetError:
                # retried if the connection has just broken off, unless the peer may have received the request
                if connection.muxed_conn.is_established or request is not None:
                    raise
            connection = await self._dialer.get_or_connect(peer)
            return await self._negotiate(connection, peer, protocols, request)
        raise UnreachableError(f"{peer} did not answer within {timeout:g} s")

    async def _negotiate(
        self, connection: SwarmConn, peer: PeerId, protocols: Sequence[str], request: bytes | None
    ) -> Libp2pStream:
        try:
            muxed = await cast(YamuxSession, connection.muxed_conn).open_stream(send_syn=False)
        except (MuxedConnError, MuxedStreamError) as error:
            raise UnreachableError(f"{peer}: {error}") from error
        supported = supported_protocols(self._peerstore, ID(peer.raw))
        early_data = request if len(protocols) == 1 and protocols[0] in supported else None
        opened = False
        try:
            with anyio.fail_after(NEGOTIATE_TIMEOUT):
                stream = Libp2pStream(muxed, await negotiate_outbound(muxed, protocols, early_data))
            if request is not None and early_data is None:
                await stream.send_eof(request)
            opened = True
            return stream
        except ProtocolNotSupportedError as error:
            raise UnsupportedProtocolError(f"{peer} speaks none of {error}") from error
        except NoMultistreamError as error:
            raise UnsupportedProtocolError(f"{peer} does not negotiate protocols: {error}") from error
        except (MuxedStreamError, MuxedConnError, TimeoutError) as error:
            if self._dialer.connection(peer) is None:
                raise UnreachableError(f"{peer}: the connection broke off") from error
            what = f"{peer} reset a stream of {', '.join(protocols)}, or does not answer"
            raise UnreachableError(f"{what}; does this node's role let it ask that?") from error
        finally:
            if not opened:
                with anyio.CancelScope(shield=True):
                    await muxed.reset()
