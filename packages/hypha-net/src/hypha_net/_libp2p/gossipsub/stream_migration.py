"""Moves what this node says by gossip to a peer from one connection to another, without a message lost.

Before it: `merging`, which chooses the connection. py-libp2p keeps the stream that it opened first for as long as its
connection lives. Here a stream is opened on the other connection before the first is given up: what waits leaves by the
old one, what is said from then on goes by the new one, and the router, its mesh and what the peer subscribes to are not
touched. Each side moves the stream that it writes on; the other reads both to their ends.
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
"""Seconds within which a peer must have agreed to the new stream; it is asked again later."""
_FAILURES: Final = (BaseLibp2pError, IOException, MuxedStreamError, MuxedConnUnavailable, trio.TooSlowError)


class StreamMigrator:
    """The gossip streams that one endpoint writes on."""

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._left: WeakSet[RpcQueue] = WeakSet()
        """Queues that take nothing more; their streams end with the last message."""
        vars(pubsub)["handle_sending_messages"] = self._send

    async def _send(self, peer: ID, stream: INetStream, queue: RpcQueue) -> None:
        """Write what is said to a peer on its stream, and end that where the peer's gossip has moved on.

        py-libp2p gives the peer up with any stream that breaks off, also with one that was left already.
        """
        try:
            while (rpc := await queue.pop()) is not None:
                await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
            if queue in self._left:
                await stream.close()
                await cast(YamuxStream, cast(NetStream, stream).muxed_stream).discard()
        except _FAILURES as error:
            _log.debug("a gossip stream to %s broke off: %s", PeerId(peer.to_bytes()), error)
        except Exception:  # noqa: BLE001 - what cannot be said to one peer ends its stream, never the node
            _log.exception("gossip to %s is given up", PeerId(peer.to_bytes()))
        else:
            return
        if self._pubsub.peers.get(peer) is stream:
            self._pubsub._handle_dead_peer(peer)

    async def follow(self, peer: ID, connection: SwarmConn) -> None:
        """Have what is said to `peer` go over `connection`, on which streams to it are opened; if need be, later."""
        old = self._pubsub.peers.get(peer)
        if old is None or old.muxed_conn is connection.muxed_conn:
            return
        try:
            with trio.fail_after(TIMEOUT):
                new = await self._pubsub.host.new_stream(peer, list(self._pubsub.protocols))
        except _FAILURES as error:
            _log.debug("gossip with %s stays where it is: %s", PeerId(peer.to_bytes()), str(error) or "too slow")
            return
        moved = False
        try:
            moved = new.muxed_conn is connection.muxed_conn and self._pubsub.peers.get(peer) is old
            if moved:
                self._swap(peer, new)
        finally:
            if not moved:
                with trio.CancelScope(shield=True):
                    await new.reset()

    def _swap(self, peer: ID, stream: INetStream) -> None:
        """At once: nothing is said in between."""
        queue = RpcQueue()
        queue.push(self._pubsub.get_hello_packet(), priority=True)
        left = self._pubsub.peer_queues[peer]
        self._pubsub.peers[peer], self._pubsub.peer_queues[peer] = stream, queue
        self._pubsub.manager.run_task(self._pubsub.handle_sending_messages, peer, stream, queue)
        self._left.add(left)
        left.close()
