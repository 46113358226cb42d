"""Moves the outgoing gossip stream of a peer from one connection to another without losing a message.

py-libp2p writes on the stream that it opened first for as long as its connection lives. Here a stream is opened on the
other connection first: queued messages leave by the old stream, later ones by the new one, and the router, its mesh and
the peer's subscriptions stay as they are. Each side moves the stream it writes on; the other reads both to their ends.
"""

from __future__ import annotations

import logging
from typing import Final, cast
from weakref import WeakSet

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError
from libp2p.utils.varint import encode_varint_prefixed

from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.pubsub")

TIMEOUT: Final = 5.0
"""Seconds for the negotiation of the new stream; the caller tries again later."""
_FAILURES: Final = (BaseLibp2pError, IOException, MuxedStreamError, MuxedConnUnavailable, trio.TooSlowError)


class StreamMigrator:
    """The outgoing gossip streams of one endpoint."""

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._draining: WeakSet[RpcQueue] = WeakSet()
        """Closed queues whose streams end after the last queued message."""
        vars(pubsub)["handle_sending_messages"] = self._send

    async def _send(self, peer: ID, stream: INetStream, queue: RpcQueue) -> None:
        """Write a peer's queue to its stream, and close the stream where the queue was replaced.

        Replaces py-libp2p's function, which removes the peer when any stream fails, even one that was replaced already.
        """
        try:
            while (rpc := await queue.pop()) is not None:
                await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
            if queue in self._draining:
                await stream.close()
                await cast(YamuxStream, cast(NetStream, stream).muxed_stream).discard()
        except _FAILURES as error:
            _log.debug("gossip stream to %s failed: %s", PeerId(peer.to_bytes()), error)
        except Exception:  # noqa: BLE001 - an error with one peer ends its stream; the node goes on
            _log.exception("gossip stream to %s failed", PeerId(peer.to_bytes()))
        else:
            return
        if self._pubsub.peers.get(peer) is stream:
            self._pubsub._handle_dead_peer(peer)

    async def follow(self, peer: ID, connection: SwarmConn) -> None:
        """Move the gossip to `peer` to `connection`, which the dialer prefers; on failure leave it where it is."""
        old = self._pubsub.peers.get(peer)
        if old is None or old.muxed_conn is connection.muxed_conn:
            return
        try:
            with trio.fail_after(TIMEOUT):
                new = await self._pubsub.host.new_stream(peer, list(self._pubsub.protocols))
        except _FAILURES as error:
            _log.debug("gossip stream to %s was not moved: %s", PeerId(peer.to_bytes()), str(error) or "too slow")
            return
        is_moved = False
        try:
            is_moved = new.muxed_conn is connection.muxed_conn and self._pubsub.peers.get(peer) is old
            if is_moved:
                self._swap(peer, new)
        finally:
            if not is_moved:
                with trio.CancelScope(shield=True):
                    await new.reset()

    def _swap(self, peer: ID, stream: INetStream) -> None:
        """Replace queue and stream without a checkpoint: no message may be queued in between."""
        queue = RpcQueue()
        queue.push(self._pubsub.get_hello_packet(), priority=True)
        old_queue = self._pubsub.peer_queues[peer]
        self._pubsub.peers[peer], self._pubsub.peer_queues[peer] = stream, queue
        self._pubsub.manager.run_task(self._pubsub.handle_sending_messages, peer, stream, queue)
        self._draining.add(old_queue)
        old_queue.close()
