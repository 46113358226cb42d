"""What peers report by identify, in py-libp2p's peerstore: addresses, protocols, agent, observed address.

Identify is https://github.com/libp2p/specs/blob/master/identify/README.md. `store_identify` replaces py-libp2p's
function, which drops the agent version and keeps addresses that cannot be printed; installed by `compat.host`. The
accessors are called by `endpoint`, `streams.outbound` and `retry`, and return an empty value before identify.
"""

from __future__ import annotations

from typing import Final, cast

import trio
from libp2p.abc import IPeerStore
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from hypha_net._libp2p.wire.delimited import read_message
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId

AGENT: Final = "hypha-python"
"""Agent version of this implementation, before the slash and its number."""
_PROTOCOL: Final = "/ipfs/id/1.0.0"
_AGENT: Final = "agent_version"
_MAX_AGENT: Final = 200
_OBSERVED: Final = "observed_address"
_IDENTIFIED_AT: Final = "identified_at"
_MAX_OBSERVED: Final = 64
"""Bytes of an observed address that are kept."""
_MAX_ADDRESSES: Final = 32
_MAX_ADDRESSES_READ: Final = 256
"""Addresses of one identify message that are read."""
_UNTIL_REPLACED: Final = 10 * 365 * 86400
"""Lifetime of addresses in the peerstore, seconds: until the peer's next identify message."""


async def store_identify(peerstore: IPeerStore, peer: ID, message: Identify) -> None:
    """Store an identify message, in place of the one before.

    Addresses that cannot be printed are dropped here: they would raise later, whenever peers are listed.
    """
    peerstore.put(peer, _AGENT, message.agent_version[:_MAX_AGENT])
    peerstore.put(peer, _IDENTIFIED_AT, trio.current_time())
    peerstore.put(peer, _OBSERVED, message.observed_addr[:_MAX_OBSERVED].hex())
    await update_peerstore_from_identify(peerstore, peer, message)
    try:
        reported = peerstore.addrs(peer)[:_MAX_ADDRESSES_READ]
    except PeerStoreError:
        reported = []
    printable = [address for address in reported if _is_printable(address)]
    peerstore.clear_addrs(peer)
    peerstore.add_addrs(peer, printable[:_MAX_ADDRESSES], _UNTIL_REPLACED)


async def ask_agent(endpoint: Endpoint, peer: PeerId, timeout: float) -> str:
    """Return the agent version of a peer, which nothing stores; empty if it does not send one in `timeout` seconds."""
    try:
        stream = await endpoint.open_stream(peer, (_PROTOCOL,), timeout=timeout)
        try:
            message = await read_message(stream, Identify)
        finally:
            await stream.aclose()
    except NetError:
        return ""
    return str(message.agent_version[:_MAX_AGENT]) if message is not None else ""


def _is_printable(address: Multiaddr) -> bool:
    try:
        return bool(str(address))
    except ValueError:
        return False


def observed_host(peerstore: IPeerStore, peer: ID) -> str | None:
    """Return this node's own host as `peer` sees it, such as ``/ip4/203.0.113.7``, or None if it did not report it."""
    try:
        parts = str(Multiaddr(bytes.fromhex(str(peerstore.get(peer, _OBSERVED))))).split("/")
    except (PeerStoreError, KeyError, ValueError):
        return None
    return "/".join(parts[:3]) if len(parts) > 3 and parts[1] in ("ip4", "ip6") else None


def identified_at(peerstore: IPeerStore, peer: ID) -> float:
    """Return when the last identify message of `peer` arrived, by the local monotonic clock; -inf before the first."""
    try:
        return cast(float, peerstore.get(peer, _IDENTIFIED_AT))
    except (PeerStoreError, KeyError):
        return float("-inf")


def agent_version(peerstore: IPeerStore, peer: ID) -> str:
    """Return the agent version of `peer`."""
    try:
        return str(peerstore.get(peer, _AGENT))
    except (PeerStoreError, KeyError):
        return ""


def supported_protocols(peerstore: IPeerStore, peer: ID) -> frozenset[str]:
    """Return the protocols that `peer` speaks."""
    try:
        return frozenset(peerstore.get_protocols(peer))
    except (PeerStoreError, KeyError):
        return frozenset()


def listen_addresses(peerstore: IPeerStore, peer: ID) -> tuple[bytes, ...]:
    """Return the addresses at which `peer` says it listens, as multiaddr bytes."""
    try:
        return tuple(address.to_bytes() for address in peerstore.addrs(peer)[:_MAX_ADDRESSES])
    except (PeerStoreError, KeyError):
        return ()
