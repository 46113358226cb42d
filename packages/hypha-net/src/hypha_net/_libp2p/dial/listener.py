"""Accept inbound connections: bound concurrent handshakes, upgrade, and wait for the connection's end.

`compat.swarm` makes py-libp2p's swarm call `accept` for each connection of its TCP listeners; calls `dial.upgrade`.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm

from hypha_net._libp2p.dial.upgrade import ForeignNodeError, upgrade
from hypha_net._libp2p.security.tls import describe_address
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.errors import RefusedError, UnreachableError
from hypha_net.events import Events, PeerRejected

_log = logging.getLogger("hypha_net.dial")

MAX_HANDSHAKES: Final = 1024
MAX_HANDSHAKES_PER_HOST: Final = 256
"""Concurrent inbound handshakes, in total and per host; further connections are closed."""


class HandshakeLimiter:
    """Limits concurrent inbound handshakes, in total and per host.

    They are not counted in `max_connections`, as py-libp2p does: then as many silent sockets would block every node.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._rejected = 0

    def log_rejection(self, raw: RawConnection, reason: str) -> None:
        """Count a rejected connection; log the first, the tenth, the hundredth and so on."""
        self._rejected += 1
        if str(self._rejected).rstrip("0") == "1":
            _log.warning(
                "connection from %s rejected: %s; %d rejected so far", describe_address(raw), reason, self._rejected
            )

    @contextmanager
    def acquire(self, host: str) -> Iterator[bool]:
        """Count one handshake of `host` while the context is open. Yield False, uncounted, if the limit is reached."""
        if self._hosts.total() >= MAX_HANDSHAKES or self._hosts[host] >= MAX_HANDSHAKES_PER_HOST:
            yield False
            return
        self._hosts[host] += 1
        try:
            yield True
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]


async def accept(swarm: Swarm, read_write_closer: Any, events: Events, limiter: HandshakeLimiter) -> None:
    """Upgrade an inbound connection and wait for its end."""
    raw = RawConnection(read_write_closer, False)
    try:
        with limiter.acquire(_host_of(raw)) as acquired:
            maximum = swarm.connection_config.max_connections
            is_full = len(swarm.get_connections()) >= maximum
            if is_full or not acquired:
                reason = f"connection limit reached (max_connections={maximum})"
                limiter.log_rejection(raw, reason if is_full else "too many concurrent handshakes")
                await raw.close()
                return
            connection = await upgrade(swarm, raw, expected=None)
    except ForeignNodeError as error:
        _log.info("connection from %s rejected: %s", describe_address(raw), error)
        events.emit(PeerRejected(None, "protocol", str(error)))
        return
    except UnreachableError as error:
        level = logging.DEBUG if isinstance(error, RefusedError) else logging.INFO  # `security.tls` logs refusals
        _log.log(level, "connection from %s failed: %s", describe_address(raw), error)
        return
    await cast(YamuxSession, connection.muxed_conn).event_closed.wait()


def _host_of(raw: RawConnection) -> str:
    """Return the remote host, which py-libp2p does not know for IPv6; empty if the socket is closed already."""
    try:
        name = cast(TrioTCPStream, raw.stream).stream.socket.getpeername()
    except OSError:
        return ""
    return network_of(name[0].partition("%")[0])


def network_of(host: str) -> str:
    """Return an IPv4 address itself, and of an IPv6 address its /64, in which a host chooses addresses freely."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
