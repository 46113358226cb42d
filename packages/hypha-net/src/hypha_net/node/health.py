"""Health of a node: the answer to ``/hypha-health/0.0.1``, which `probe` requests.

Called by `lifecycle`; the program sets it through `Node.ready` and `Node.waiting`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.health import Health

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Readiness:
    """Whether the program is ready, and the reason while it is not."""

    is_ready: bool = False
    reason: str | None = "starting"

    def ready(self) -> None:
        """Report the node as healthy from now on."""
        if not self.is_ready:
            _log.info("ready")
        self.is_ready, self.reason = True, None

    def waiting(self, reason: str) -> None:
        """Report the node as not healthy from now on, because of `reason`."""
        if (self.is_ready, self.reason) != (False, reason):
            _log.info("not ready: %s", reason)
        self.is_ready, self.reason = False, reason


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
    )


def serve_health(endpoint: Endpoint, readiness: Readiness, *, role: str, version: str) -> None:
    """Answer the health requests of all peers while the endpoint is open."""
    from hypha_net import rpc
    from hypha_proto.health import HEALTH_CHECK, HealthRequest
    from hypha_proto.ids import PeerId

    async def answer(peer: PeerId, request: HealthRequest) -> Health:
        return health_now(readiness, endpoint, role=role, version=version)

    rpc.serve(endpoint, HEALTH_CHECK, answer)
