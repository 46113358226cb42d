"""Health check: whether a node is ready, its role and version, its traffic counters, and twins of the one that asks."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Final

from hypha_proto.protocols import HEALTH, RpcMethod
from hypha_proto.texts import quote
from hypha_proto.wire_schema import OMIT, U64, Message

_ADDRESS: Final = re.compile(r"[!-~]{1,256}")


class Caller(Message, frozen=True):
    """The process that asks, by which a gateway finds two that use one certificate."""

    process: uuid.UUID
    """Made when it started."""
    age_ms: U64
    """Milliseconds since then."""
    address: str
    """Where it listens, for people."""

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address):
            raise ValueError(f"address {quote(self.address)} of a caller is not of 1 to 256 visible ASCII characters")


class HealthRequest(Message, frozen=True):
    """Request for a node's health."""

    caller: Annotated[Caller | None, OMIT] = None


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
    twin: Annotated[str | None, OMIT] = None
    """Address of an older process that uses the certificate of the caller, as it says of itself."""


HEALTH_CHECK: Final = RpcMethod(HEALTH, HealthRequest, Health)
