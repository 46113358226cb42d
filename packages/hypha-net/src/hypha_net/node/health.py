"""Health of a node: the answer to ``/hypha-health/0.0.1``, which `probe` requests.

Called by `lifecycle`; the program sets it through `Node.ready` and `Node.waiting`, and `watch_gateways` lets no node be
healthy that has gateways configured and reaches none.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.health import Health

_log = logging.getLogger(__name__)


GATEWAY_POLL: Final = 0.1
"""Seconds between looking whether a gateway is connected."""
GATEWAY_WARNING: Final = 60.0
"""Seconds between two warnings while none is."""


@dataclass(slots=True)
class Readiness:
    """Whether the program is ready and the network is reached, and the reason while it is not."""

    outage: str | None = None
    """Why the network is not reached; None if it is."""
    _program: str | None = "starting"
    """Why the program is not ready; None if it is."""

    @property
    def is_ready(self) -> bool:
        """Whether the node is healthy."""
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it is not; None if it is."""
        return self.outage or self._program

    def ready(self) -> None:
        """Note that the program is ready from now on."""
        self._set(None, self.outage)

    def waiting(self, reason: str) -> None:
        """Note that the program is not ready from now on, because of `reason`."""
        self._set(reason, self.outage)

    def note_network(self, outage: str | None) -> None:
        """Note why the network is not reached from now on, or that it is."""
        self._set(self._program, outage)

    def _set(self, program: str | None, network: str | None) -> None:
        before = self.reason
        self._program, self.outage = program, network
        if self.reason is None and before is not None:
            _log.info("ready")
        elif self.reason is not None and self.reason != before:
            _log.info("not ready: %s", self.reason)


def gateway_outage(endpoint: Endpoint) -> str | None:
    """Return that none of the configured gateways is connected; None if one is, or if there are none."""
    gateways = endpoint.gateways()
    if not gateways or any(peer is not None for peer in gateways.values()):
        return None
    return f"no gateway is connected: {', '.join(gateways)}"


async def watch_gateways(endpoint: Endpoint, readiness: Readiness) -> None:
    """Report the node as not healthy while none of its gateways is connected, and warn of it, until cancelled."""
    due = anyio.current_time() + GATEWAY_WARNING
    while endpoint.gateways():
        outage, now = gateway_outage(endpoint), anyio.current_time()
        readiness.note_network(outage)
        if outage is None:
            due = now + GATEWAY_WARNING
        elif now >= due:
            _log.warning("%s; check gateway_addresses, and that a gateway runs there", outage)
            due += GATEWAY_WARNING
        await anyio.sleep(GATEWAY_POLL)


def health_now(readiness: Readiness, endpoint: Endpoint, *, role: str, version: str) -> Health:
    """Return the current health."""
    from hypha_proto.health import Health

    traffic = endpoint.traffic
    return Health(
        healthy=readiness.is_ready,
        role=role,
        version=version,
        reason=readiness.reason,
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        time_ms=int(time.time() * 1000),
    )


def serve_health(endpoint: Endpoint, readiness: Readiness, *, role: str, version: str) -> None:
    """Answer the health requests of all peers while the endpoint is open."""
    from hypha_net import rpc
    from hypha_proto.health import HEALTH_CHECK, HealthRequest
    from hypha_proto.ids import PeerId

    async def answer(peer: PeerId, request: HealthRequest) -> Health:
        return health_now(readiness, endpoint, role=role, version=version)

    rpc.serve(endpoint, HEALTH_CHECK, answer)
