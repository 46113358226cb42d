"""Job dispatch: starting a job on a leased worker, and its status."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.job_spec import JobSpec
from hypha_proto.protocols import API, RpcMethod
from hypha_proto.resources import Timestamp
from hypha_proto.wire_schema import EXTERNAL, OMIT, U32, U64, Message, Newtype, Unit


class DispatchJob(Message, frozen=True):
    """Request to run `spec` on a lease of the sender."""

    id: uuid.UUID
    """Id of the lease; schedulers of the older network make one id of their own for all dispatches of a job."""
    spec: JobSpec
    traceparent: Annotated[str | None, OMIT] = None
    keep_lease: Annotated[bool | None, OMIT] = None
    """Whether the lease is kept for another dispatch when this task ends by itself; otherwise it is spent then."""
    attempt: Annotated[U32 | None, OMIT] = None
    """Number of the dispatch on this lease, from 0; a worker starts only later ones than the newest that it knows."""
    orphan_grace_ms: Annotated[U64 | None, OMIT] = None
    """Milliseconds for which the job may run on, and its lease is held, after the lease was last renewed in time; the
    worker's owner may allow less. None means that the job ends with its lease."""


class Dispatched(Message, frozen=True, tag="Dispatched"):
    """Confirmation that the job is starting."""

    id: uuid.UUID
    """Id of the dispatch, as it came."""
    timeout: Timestamp
    """Expiry of the lease by the worker's clock; only for older peers."""
    timeout_ms: Annotated[U64 | None, OMIT] = None
    """Remaining life of the lease in milliseconds from receipt."""


class DispatchFailed(Unit, frozen=True, tag="Failed"):
    """Rejection: unknown lease, unknown executor, or the job cannot be started."""


DispatchResult = Dispatched | DispatchFailed


class Running(Message, frozen=True, tag="Running"):
    """The executor is running."""


class Finished(Message, frozen=True, tag="Finished"):
    """The executor ended successfully."""


class Failed(Message, frozen=True, tag="Failed"):
    """The executor failed."""


class Unknown(Message, frozen=True, tag="Unknown"):
    """The worker does not know the job."""


class JobStatus(Message, frozen=True):
    """Report of a worker on the status of a dispatched job."""

    task_id: uuid.UUID
    """Id of the dispatch, as it came in `DispatchJob`."""
    status: Running | Finished | Failed | Unknown
    traceparent: Annotated[str | None, OMIT] = None
    attempt: Annotated[U32 | None, OMIT] = None
    """`DispatchJob.attempt` of the dispatch; None where it stated none."""


class StatusReceived(Message, frozen=True):
    """Acknowledgement of `JobStatus`."""


class NotFound(Unit, frozen=True, tag="NotFound"):
    """The requested item does not exist."""


class WireError(Newtype, frozen=True, tag="Error"):
    """Failure with a message for people."""

    message: str


DISPATCH_JOB: Final = RpcMethod[DispatchJob, DispatchResult](
    API, DispatchJob, Annotated[DispatchResult, EXTERNAL], "DispatchJob"
)
JOB_STATUS: Final = RpcMethod[JobStatus, StatusReceived](API, JobStatus, StatusReceived, "JobStatus")
