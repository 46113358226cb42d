"""Drain: a worker announces to its schedulers that it will end, and how long running tasks may go on.

Uses the extension ``/hypha-drain/0.1.0``. `leases.Goodbye` follows when the worker ends.
"""

from __future__ import annotations

import uuid
from typing import Final

from hypha_proto.protocols import DRAIN, RpcMethod
from hypha_proto.wire_schema import U64, Message


class Drain(Message, frozen=True):
    """Announcement of a worker that it takes no further task on these leases, and ends them with their tasks."""

    leases: tuple[uuid.UUID, ...]
    left_ms: U64
    """Milliseconds from receipt until the worker ends at the latest, whatever still runs."""
    reason: str
    """One line for people."""


class DrainReceived(Message, frozen=True):
    """Acknowledgement of `Drain`."""


ANNOUNCE_DRAIN: Final = RpcMethod(DRAIN, Drain, DrainReceived)
