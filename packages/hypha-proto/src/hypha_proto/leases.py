"""Holding what was offered: renewals, releases, and why a lease or a job ended.

Renewals are the old wire's yes or no on ``/hypha-api``; the rest is ``/hypha-lease/0.1.0``, between our own nodes.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final, Literal

from hypha_proto.offers import WorkerRequest
from hypha_proto.protocols import API, LEASE, RpcMethod
from hypha_proto.resources import Timestamp
from hypha_proto.wire_schema import EXTERNAL, I64, OMIT, U64, Message, Unit

TEMPORARY_LEASE: Final = 0.5
"""Life of an offer's lease, seconds."""
RENEWED_LEASE: Final = 10.0
"""Life of a renewed lease, seconds."""
RENEW_AT: Final = 1 / 3
"""Share of a lease's life after which our schedulers renew it; those of the older network do at 0.75."""
LEASE_SWEEP: Final = 0.25
"""Seconds within which an expired lease is dropped and its jobs are being cancelled."""


class RenewLease(Message, frozen=True):
    """Keep the lease `id`; takes an offer when it is still temporary."""

    id: uuid.UUID
    traceparent: Annotated[str | None, OMIT] = None


class Renewed(Message, frozen=True, tag="Renewed"):
    """The lease is held on."""

    id: uuid.UUID
    timeout: Timestamp
    timeout_ms: Annotated[U64 | None, OMIT] = None


class RenewalFailed(Unit, frozen=True, tag="Failed"):
    """There is no such lease, or it is another peer's."""


LeaseRenewal = Renewed | RenewalFailed


class ReleaseLease(Message, frozen=True):
    """The scheduler needs the lease `id` no longer; jobs on it are cancelled."""

    id: uuid.UUID
    reason: str = ""
    traceparent: Annotated[str | None, OMIT] = None


class LeaseReleased(Message, frozen=True):
    """`known` is false when there was no such lease of the asking peer (any more)."""

    known: bool


class CancelJob(Message, frozen=True):
    """Stop the job that runs on the lease `id`, and keep the lease."""

    id: uuid.UUID
    reason: str
    traceparent: Annotated[str | None, OMIT] = None


class JobCancelled(Message, frozen=True):
    """`known` is false when no job ran there."""

    known: bool


class WhyNot(Message, frozen=True):
    """Why would you not bid on this?"""

    request: WorkerRequest


class Reasons(Message, frozen=True):
    """Every reason against a bid, in words for the operator; none when an offer would be made."""

    reasons: tuple[str, ...]


Outcome = Literal["finished", "failed", "cancelled"]


class JobEnd(Message, frozen=True):
    """A worker tells its scheduler how a job ended, once its processes are gone."""

    lease: uuid.UUID
    job_id: uuid.UUID
    outcome: str
    """``finished``, ``failed`` or ``cancelled``."""
    reason: str
    """One line for people; empty when finished."""
    exit_code: I64 | None = None
    """The executor's exit status, negative for a signal; none when no process ran."""
    last_lines: tuple[str, ...] = ()
    """The end of what the executor printed."""
    traceparent: Annotated[str | None, OMIT] = None

    def __post_init__(self) -> None:
        if self.outcome not in ("finished", "failed", "cancelled"):
            raise ValueError(f"outcome {self.outcome[:40]!r} is not finished, failed or cancelled")


class JobEndReceived(Message, frozen=True):
    """The scheduler knows."""


RENEW_LEASE: Final = RpcMethod[RenewLease, LeaseRenewal](
    API, RenewLease, Annotated[LeaseRenewal, EXTERNAL], "RenewLease"
)
RELEASE_LEASE: Final = RpcMethod[ReleaseLease, LeaseReleased](LEASE, ReleaseLease, LeaseReleased, "ReleaseLease")
CANCEL_JOB: Final = RpcMethod[CancelJob, JobCancelled](LEASE, CancelJob, JobCancelled, "CancelJob")
WHY_NOT: Final = RpcMethod[WhyNot, Reasons](LEASE, WhyNot, Reasons, "WhyNot")
JOB_END: Final = RpcMethod[JobEnd, JobEndReceived](LEASE, JobEnd, JobEndReceived, "JobEnd")
