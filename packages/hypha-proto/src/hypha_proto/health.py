"""Is this node well, and who is it?"""

from __future__ import annotations

from typing import Annotated, Final

from hypha_proto.protocols import HEALTH, RpcMethod
from hypha_proto.wire_schema import OMIT, U64, Message


class HealthRequest(Message, frozen=True):
    """How are you?"""


class Health(Message, frozen=True):
    """Whether the node is ready for its work; the rest is ours and may be missing."""

    healthy: bool
    role: Annotated[str | None, OMIT] = None
    version: Annotated[str | None, OMIT] = None
    reason: Annotated[str | None, OMIT] = None
    """What an unhealthy node waits for."""
    bytes_sent: Annotated[U64 | None, OMIT] = None
    """Bytes on the wire since the node started, headers included."""
    bytes_received: Annotated[U64 | None, OMIT] = None


HEALTH_CHECK: Final = RpcMethod[HealthRequest, Health](HEALTH, HealthRequest, Health)
