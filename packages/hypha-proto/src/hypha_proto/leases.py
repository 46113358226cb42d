"""Leases: renewal and release, the goodbye of a worker that shuts down, and explaining why no offer was made.

Renewals use ``/hypha-api``, everything else ``/hypha-lease/0.1.0`` and ``/hypha-goodbye/0.1.0``.
"""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Final, cast

from hypha_proto.offers import WorkerRequest
from hypha_proto.protocols import API, GOODBYE, LEASE, RpcMethod
from hypha_proto.resources import RESOURCE_UNITS
from hypha_proto.texts import quote
from hypha_proto.wire_schema import EXTERNAL, OMIT, U64, Amount, Message, Unit

TEMPORARY_LEASE: Final = 0.5
"""Life of an offer's temporary lease in seconds."""
RENEWED_LEASE: Final = 10.0
"""Life of a renewed lease in seconds."""
RENEW_AT: Final = 1 / 3
"""Fraction of a lease's life after which schedulers renew it."""
LEASE_SWEEP: Final = 0.25
"""Interval in seconds at which workers drop expired leases and cancel their jobs."""


_CODE: Final = re.compile(r"[a-z][a-z-]{0,23}")
REJECTION_CODES: Final = ("price", *RESOURCE_UNITS, "executor", "busy", "not-allowed", "quota", "draining", "paused")
"""Codes of `Rejection`. ``price``: the bid is too low. Name of a resource: the machine has too little of it.
``executor``: not configured. ``busy``: leases hold the resources. ``not-allowed``, ``quota``: this scheduler gets no
offers, or has as many as it may. ``draining``, ``paused``: the worker makes no offers."""


class RenewLease(Message, frozen=True):
    """Request to renew the lease `id`; renewing a temporary lease accepts the offer."""

    id: uuid.UUID
    traceparent: Annotated[str | None, OMIT] = None


class Renewed(Message, frozen=True, tag="Renewed"):
    """Confirmation of a renewal."""

    id: uuid.UUID
    timeout_ms: U64
    """Life of the renewed lease in milliseconds from receipt."""


class RenewalFailed(Unit, frozen=True, tag="Failed"):
    """Rejection: there is no such lease, or it belongs to another peer."""


LeaseRenewal = Renewed | RenewalFailed


class ReleaseLease(Message, frozen=True):
    """Request to end the lease `id`; jobs on it are cancelled."""

    id: uuid.UUID
    reason: str = ""
    traceparent: Annotated[str | None, OMIT] = None


class LeaseReleased(Message, frozen=True):
    """Response to `ReleaseLease`."""

    known: bool
    """False if the requesting peer holds no such lease (any more)."""


class WhyNot(Message, frozen=True):
    """Request to a worker: why would it make no offer for this request?"""

    request: WorkerRequest


class Rejection(Message, frozen=True):
    """One reason against an offer: a code for programs, words for the operator, and the amounts if it is an amount."""

    code: str
    """One of `REJECTION_CODES`, or another that a newer worker sends: lower-case words joined by hyphens."""
    text: str
    required: Annotated[Amount | None, OMIT] = None
    """What the request or this worker's price requires: GB, cores, or tokens per lease-hour."""
    available: Annotated[Amount | None, OMIT] = None
    """What there is of it: free resources, or the bid."""

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise ValueError(f"code {quote(self.code)} of a rejection is not of the form 'not-allowed'")


class Reasons(Message, frozen=True):
    """Every reason against an offer; empty if the worker would make one."""

    rejections: tuple[Rejection, ...] = ()


class Goodbye(Message, frozen=True):
    """Announcement of a worker that it is shutting down: these leases end now."""

    leases: tuple[uuid.UUID, ...]
    reason: str
    """One line for people."""


class GoodbyeReceived(Message, frozen=True):
    """Acknowledgement of `Goodbye`."""


RENEW_LEASE: Final = RpcMethod(
    API, RenewLease, cast(type[LeaseRenewal], Annotated[LeaseRenewal, EXTERNAL]), "RenewLease"
)
RELEASE_LEASE: Final = RpcMethod(LEASE, ReleaseLease, LeaseReleased, "ReleaseLease")
WHY_NOT: Final = RpcMethod(LEASE, WhyNot, Reasons, "WhyNot")
SAY_GOODBYE: Final = RpcMethod(GOODBYE, Goodbye, GoodbyeReceived)
