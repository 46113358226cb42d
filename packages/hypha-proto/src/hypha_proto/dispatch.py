"""Handing a job to a worker, and how it stands."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.job_spec import JobSpec
from hypha_proto.protocols import API, RpcMethod
from hypha_proto.resources import Timestamp
from hypha_proto.wire_schema import EXTERNAL, OMIT, U64, Message, Newtype, Unit


class DispatchJob(Message, frozen=True):
    """Run `spec` on the lease `id`."""

    id: uuid.UUID
    spec: JobSpec
    traceparent: Annotated[str | None, OMIT] = None


class Dispatched(Message, frozen=True, tag="Dispatched"):
    """The job is starting."""

    id: uuid.UUID
    timeout: Timestamp
    timeout_ms: Annotated[U64 | None, OMIT] = None


class DispatchFailed(Unit, frozen=True, tag="Failed"):
    """There is no such lease, no such executor, or the job cannot be started."""


DispatchResult = Dispatched | DispatchFailed


class Running(Message, frozen=True, tag="Running"):
    """The executor runs."""


class Finished(Message, frozen=True, tag="Finished"):
    """The executor ended well."""


class Failed(Message, frozen=True, tag="Failed"):
    """The executor ended badly."""


class Unknown(Message, frozen=True, tag="Unknown"):
    """The worker does not know the job."""


class JobStatus(Message, frozen=True):
    """A worker says how the job on a lease stands; `task_id` is the lease's id."""

    task_id: uuid.UUID
    status: Running | Finished | Failed | Unknown
    traceparent: Annotated[str | None, OMIT] = None


class StatusReceived(Message, frozen=True):
    """The scheduler knows."""


class ParameterPull(Message, frozen=True):
    """Old wire: ask for a parameter by key."""

    job_id: uuid.UUID
    key: str
    version: U64 | None = None


class PullSuccess(Message, frozen=True, tag="Success"):
    """The parameter's version, and the stream that carries it."""

    version: U64
    data_stream_id: uuid.UUID


class NotFound(Unit, frozen=True, tag="NotFound"):
    """There is none."""


class WireError(Newtype, frozen=True, tag="Error"):
    """It went wrong, in words."""

    message: str


class ParameterPush(Message, frozen=True, kw_only=True):
    """Old wire: announce a parameter."""

    job_id: uuid.UUID
    key: str
    version: U64 | None = None
    data_stream_id: uuid.UUID
    data_size: U64


class PushSuccess(Message, frozen=True, tag="Success"):
    """The parameter was stored as `version`."""

    version: U64


DISPATCH_JOB: Final = RpcMethod[DispatchJob, DispatchResult](
    API, DispatchJob, Annotated[DispatchResult, EXTERNAL], "DispatchJob"
)
JOB_STATUS: Final = RpcMethod[JobStatus, StatusReceived](API, JobStatus, StatusReceived, "JobStatus")
PARAMETER_PULL: Final = RpcMethod[ParameterPull, PullSuccess | NotFound | WireError](
    API, ParameterPull, Annotated[PullSuccess | NotFound | WireError, EXTERNAL], "ParameterPull"
)
PARAMETER_PUSH: Final = RpcMethod[ParameterPush, PushSuccess | WireError](
    API, ParameterPush, Annotated[PushSuccess | WireError, EXTERNAL], "ParameterPush"
)
