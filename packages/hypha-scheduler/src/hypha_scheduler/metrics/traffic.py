"""Traffic counts: asks peers how many bytes they have sent and received, to measure the network traffic of a job."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import anyio

from hypha_net import rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.health import HEALTH_CHECK, HealthRequest
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Bytes sent and received by a node since it started, headers included."""

    sent: int = 0
    received: int = 0

    def __sub__(self, other: TrafficCounts) -> TrafficCounts:
        return TrafficCounts(max(0, self.sent - other.sent), max(0, self.received - other.received))


async def measure_traffic(
    endpoint: Endpoint, peers: Iterable[PeerId], into: dict[PeerId, TrafficCounts], timeout: float = 5.0
) -> None:
    """Ask all peers concurrently and store their counts in `into`; peers that report none are left out."""
    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(_ask, endpoint, peer, into, timeout)


async def _ask(endpoint: Endpoint, peer: PeerId, into: dict[PeerId, TrafficCounts], timeout: float) -> None:
    try:
        health = await rpc.call(endpoint, peer, HEALTH_CHECK, HealthRequest(), timeout=timeout)
    except NetError as error:
        _log.info("%s does not report its traffic: %s", peer, error)
        return
    if health.bytes_sent is not None and health.bytes_received is not None:
        into[peer] = TrafficCounts(health.bytes_sent, health.bytes_received)
