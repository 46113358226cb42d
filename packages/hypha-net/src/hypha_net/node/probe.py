"""Probe of a peer: connects to it and asks for its health and identity."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hypha_net.node.accounts import time_text
from hypha_net.node.config.models import NodeConfig

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.ids import PeerId

IDENTIFY_TIMEOUT: Final = 1.0
"""Seconds to wait for identify, which runs beside the health check and may end after it."""
_POLL: Final = 0.02


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer of a peer, and the role and expiry in its certificate."""

    peer_id: str
    healthy: bool
    reason: str | None
    role: str | None
    agent: str
    """Identify's agent version."""
    version: str | None
    certificate_end: str | None
    """UTC, as ``2026-12-31T00:00:00Z``."""
    bytes_sent: int | None
    bytes_received: int | None
    clock_offset: float | None
    """Seconds by which its clock is ahead of this one, with an error up to the answer's time; None if not stated."""


async def probe(config: NodeConfig, address: str, timeout: float) -> Probed:
    """Connect to `address` as this node, without listening, and ask for health and agent.

    Raises:
        IdentityError: this node's own certificates cannot be used.
        UnreachableError: no answer within `timeout` seconds, or one side refused the other.
        NetError: the peer answered, but is not a Hypha node.
    """
    import anyio

    from hypha_net import open_endpoint
    from hypha_net.errors import UnreachableError
    from hypha_net.identity import load_identity
    from hypha_net.rpc import call
    from hypha_net.settings import EndpointSettings
    from hypha_proto.health import HEALTH_CHECK, HealthRequest

    identity = load_identity(config.cert_pem, config.key_pem, config.trust_pem, config.crls_pem)
    settings = EndpointSettings(listen_addresses=(), relay_circuit=False)
    try:
        with anyio.fail_after(timeout):
            async with open_endpoint(identity, settings) as endpoint:
                peer = await endpoint.connect(address, timeout=timeout)
                asked = time.time()
                health = await call(endpoint, peer, HEALTH_CHECK, HealthRequest(), timeout=timeout)
                middle = (asked + time.time()) / 2
                about = endpoint.connected_peers().get(peer)
                agent = await _agent(endpoint, peer)
    except TimeoutError:
        raise UnreachableError(f"{address}: no answer within {timeout:g} s") from None
    end = about.certificate_not_after if about else None
    return Probed(
        peer_id=str(peer),
        healthy=health.healthy,
        reason=health.reason,
        role=(about.role if about else None) or health.role,
        agent=agent,
        version=health.version,
        certificate_end=None if end is None else time_text(end),
        bytes_sent=health.bytes_sent,
        bytes_received=health.bytes_received,
        clock_offset=None if health.time_ms is None else round(health.time_ms / 1000 - middle, 1),
    )


async def _agent(endpoint: Endpoint, peer: PeerId) -> str:
    """Return the peer's agent version; empty if it is not known within `IDENTIFY_TIMEOUT` seconds."""
    import anyio

    from hypha_net._libp2p.identify.peer_metadata import ask_agent

    left = anyio.current_effective_deadline() - anyio.current_time()  # a healthy peer has answered in time
    wait = min(IDENTIFY_TIMEOUT, left - _POLL)
    agent = ""
    with anyio.move_on_after(wait):
        if peer == endpoint.peer_id:  # its certificate is our own: py-libp2p does not identify such a peer
            return await ask_agent(endpoint, peer, wait)
        while not agent:
            about = endpoint.connected_peers().get(peer)
            agent = about.agent if about else ""
            await anyio.sleep(0 if agent else _POLL)
    return agent
