"""Dial one TCP multiaddr: resolve the name in it, connect, and upgrade the connection.

Replaces `Swarm.dial_peer` and `host.connect` of py-libp2p, which know one address, sleep after success and block a peer
for a minute after a failure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from multiaddr import Multiaddr

from hypha_net._libp2p.dial.happy_eyeballs import ATTEMPT_DELAY, run_staggered
from hypha_net._libp2p.dial.upgrade import upgrade
from hypha_net.errors import NotRunningError, UnreachableError, describe_root_cause, root_cause
from hypha_proto.ids import PeerId

_FAMILIES: Final = {
    "dns": trio.socket.AF_UNSPEC,
    "dns4": trio.socket.AF_INET,
    "dns6": trio.socket.AF_INET6,
}


async def dial_tcp(
    swarm: Swarm, address: Multiaddr, expected: PeerId | None, is_excluded: Callable[[str], bool] = lambda _host: False
) -> SwarmConn:
    """Dial one TCP address and upgrade the connection.

    Args:
        expected: the peer that must answer; None accepts any.
        is_excluded: whether a name must not lead to an IP address.

    Raises:
        RefusedError: one side does not accept the other's certificate, or another peer than `expected` answers.
        NotRunningError: no process listens there, at any address of the name.
        UnreachableError: no answer.
    """
    _, kind, host, _, port = str(address).split("/")[:5]
    try:
        stream = await _connect(kind, host, int(port), is_excluded)
    except OSError as error:
        what = f"{address}: {describe_root_cause(error)}"
        raise (NotRunningError if _nobody_listens(error) else UnreachableError)(what) from error
    return await upgrade(swarm, RawConnection(TrioTCPStream(stream), True), expected=expected)


async def _connect(kind: str, host: str, port: int, is_excluded: Callable[[str], bool]) -> trio.SocketStream:
    """Open a TCP connection. Names are resolved by the system's resolver, unlike in py-libp2p.

    Raises:
        OSError: the name does not exist, or none of its addresses answers.
        UnreachableError: the name leads to excluded addresses only.
    """
    if kind not in _FAMILIES:
        return await trio.open_tcp_stream(host, port)
    found = await trio.socket.getaddrinfo(host, port, family=_FAMILIES[kind], type=trio.socket.SOCK_STREAM)
    resolved = list(dict.fromkeys(str(address[0]) for *_, address in found))
    allowed = [each for each in resolved if not is_excluded(each)]
    if not allowed:
        raise UnreachableError(f"the name {host} of a peer leads to {', '.join(resolved)}, left out by exclude_cidr")
    return await _connect_to_first(allowed, port)


async def _connect_to_first(hosts: Sequence[str], port: int) -> trio.SocketStream:
    """Return the first connection to one of several addresses (RFC 8305).

    Raises:
        OSError: none answers; a refusal only if all of them refuse.
    """
    opened: list[trio.SocketStream] = []
    failures: list[OSError] = []

    async def attempt(host: str) -> None:
        try:
            opened.append(await trio.open_tcp_stream(host, port))
            race.cancel()
        except OSError as error:
            failures.append(error)

    try:
        with trio.CancelScope() as race:
            await run_staggered([functools.partial(attempt, host) for host in hosts], ATTEMPT_DELAY)
        await trio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        for stream in opened:
            await trio.aclose_forcefully(stream)
        raise
    for late in opened[1:]:
        await trio.aclose_forcefully(late)
    if not opened:
        raise min(failures, key=_nobody_listens)
    return opened[0]


def _nobody_listens(error: OSError) -> bool:
    """Return whether the host answered that no process has the port open."""
    return isinstance(root_cause(error), ConnectionRefusedError)
