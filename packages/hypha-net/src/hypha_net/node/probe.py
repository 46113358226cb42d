"""Asks a peer how it is and who it is. The command `probe` shows the answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from hypha_net.node.config.models import NodeConfig

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.ids import PeerId

IDENTIFY_WAIT: Final = 1.0
"""Seconds that the answer waits for identify, which runs beside the health check and may end after it."""
_POLL: Final = 0.02


@dataclass(frozen=True, slots=True)
class Probed:
    """What a peer says of itself, and what its certificate says of it."""

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

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values."""
        return asdict(self)


async def probe(config: NodeConfig, address: str, timeout: float) -> Probed:
    """Connect to `address` as this node, without listening, and ask.

    Raises:
        IdentityError: this node's own certificates cannot be used.
        UnreachableError: nobody answered within `timeout` seconds, or one side refused the other.
        NetError: the peer answered, but not as a Hypha node does.
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
                health = await call(endpoint, peer, HEALTH_CHECK, HealthRequest(), timeout=timeout)
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
        certificate_end=None if end is None else datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        bytes_sent=health.bytes_sent,
        bytes_received=health.bytes_received,
    )


async def _agent(endpoint: Endpoint, peer: PeerId) -> str:
    """What program the peer says it is; empty when it keeps that back for `IDENTIFY_WAIT` seconds."""
    import anyio

    from hypha_net.node.identify_client import ask_agent

    left = anyio.current_effective_deadline() - anyio.current_time()  # a peer that is well has answered in time
    wait = min(IDENTIFY_WAIT, left - _POLL)
    if peer == endpoint.peer_id:  # asked about ourselves, with our own certificate: the engine does not identify that
        return await ask_agent(endpoint, peer, wait)
    agent = ""
    with anyio.move_on_after(wait):
        while not agent:
            about = endpoint.connected_peers().get(peer)
            agent = about.agent if about else ""
            await anyio.sleep(0 if agent else _POLL)
    return agent
