"""What is replaced in py-libp2p's `Swarm`: how it accepts connections, and which muxer it uses.

`Swarm._do_handle_inbound_connection` holds one of a fixed number of tokens for the swarm's whole life instead of the
connection's, and counts handshakes as connections. It is replaced by `dial.listener.accept`. A test fails when the
source of the replaced method changes.
"""

from __future__ import annotations

import math
import types
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import trio
from libp2p.abc import INetConn, INetwork
from libp2p.custom_types import TProtocol
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from hypha_net._libp2p.compat.notifee import SilentNotifee
from hypha_net._libp2p.dial.listener import HandshakeLimiter, accept
from hypha_net._libp2p.yamux.receive_buffer import UnreadBytes
from hypha_net._libp2p.yamux.session import PROTOCOL, YamuxSession
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.events import Events

REGISTRATION_TIMEOUT: Final = 15
"""Seconds that an inbound stream waits until its connection is registered with the swarm."""
REPLACED_METHOD: Final = "_do_handle_inbound_connection"


class RegistrationBarrier(SilentNotifee):
    """Notifee that releases the streams of a connection once the swarm has registered the connection."""

    def __init__(self) -> None:
        self._pending: WeakKeyDictionary[Any, trio.Event] = WeakKeyDictionary()

    def expect(self, session: YamuxSession, registered: trio.Event) -> None:
        """Set `registered` when the session's connection is registered."""
        self._pending[session] = registered

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """Release the streams of `conn`."""
        registered = self._pending.pop(conn.muxed_conn, None)
        if registered is not None:
            registered.set()


class YamuxMultistream(MuxerMultistream):
    """Muxer negotiation that makes a `YamuxSession`, where py-libp2p names its own class."""

    def __init__(self, serve: Callable[[YamuxStream], Awaitable[None]]) -> None:
        """Pass streams that peers open to `serve`."""
        super().__init__({TProtocol(PROTOCOL): cast(Any, YamuxSession)})
        self._serve = serve
        self._unread: WeakValueDictionary[ID, UnreadBytes] = WeakValueDictionary()
        self.registrations = RegistrationBarrier()

    async def new_conn(self, conn: Any, peer_id: ID) -> YamuxSession:
        """Agree on yamux and make a session on the connection."""
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        registered = trio.Event()
        unread = self._unread.setdefault(peer_id, UnreadBytes())
        session = YamuxSession(conn, peer_id, self._serve_after(registered), unread)
        self.registrations.expect(session, registered)
        return session

    def _serve_after(self, registered: trio.Event) -> Callable[[YamuxStream], Awaitable[None]]:
        """Return a function that serves a connection's streams once the swarm has registered the connection.

        A peer may open streams as soon as its own half of the handshake is done, but its certificate, role and whether
        it is relayed are known of registered connections only.
        """

        async def serve(stream: YamuxStream) -> None:
            # in steps of a second: if this process was suspended, one long timeout would have passed when it resumes
            for _ in range(0 if registered.is_set() else REGISTRATION_TIMEOUT):
                with trio.move_on_after(1.0):
                    await registered.wait()
                    break
            if not registered.is_set():  # the connection failed
                await stream.reset()
                return
            await self._serve(stream)

        return serve


def patch_swarm(swarm: Swarm, events: Events) -> None:
    """Make this swarm, whose muxer is a `YamuxMultistream`, accept connections with `dial.listener.accept`."""
    multistream = swarm.upgrader.muxer_multistream
    assert isinstance(multistream, YamuxMultistream)
    swarm.register_notifee(multistream.registrations)
    swarm._inbound_limiter = trio.CapacityLimiter(math.inf)  # `HandshakeLimiter` limits instead
    limiter = HandshakeLimiter()

    async def handle(self: Swarm, read_write_closer: Any, _address: Multiaddr, _failure: Any) -> None:
        await accept(self, read_write_closer, events, limiter)

    setattr(swarm, REPLACED_METHOD, types.MethodType(handle, swarm))
