"""Health check: whether a node is ready, its role and version, and its traffic counters."""

from __future__ import annotations

from typing import Annotated, Final

from hypha_proto.protocols import HEALTH, RpcMethod
from hypha_proto.wire_schema import OMIT, U64, Message


class HealthRequest(Message, frozen=True):
    """Request for a node's health."""


class Health(Message, frozen=True):
    """Health of a node. Only `healthy` is always present."""

    healthy: bool
    """Whether the node is ready for its work."""
    role: Annotated[str | None, OMIT] = None
    version: Annotated[str | None, OMIT] = None
    reason: Annotated[str | None, OMIT] = None
    """What an unhealthy node is waiting for."""
    bytes_sent: Annotated[U64 | None, OMIT] = None
    """Bytes sent on the network since the node started, headers included."""
    bytes_received: Annotated[U64 | None, OMIT] = None
    """Bytes received since the node started, headers included."""
    time_ms: Annotated[U64 | None, OMIT] = None
    """The node's clock, milliseconds since the epoch: only to tell people that a clock is wrong."""


HEALTH_CHECK: Final = RpcMethod[HealthRequest, Health](HEALTH, HealthRequest, Health)
