"""Job progress: reports of executors, and the scheduler's responses that say what to do next."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.protocols import PROGRESS, RpcMethod
from hypha_proto.wire_schema import EXTERNAL, F32, OMIT, U32, Message, Unit


class BatchDone(Message, frozen=True, tag="status"):
    """Report that one batch was processed."""

    batch_size: U32
    """Number of samples in the batch."""
    slices: Annotated[dict[str, U32] | None, OMIT] = None
    """Number of samples taken from each slice; keys are slice indexes as decimal text."""
    batch_ms: Annotated[float | None, OMIT] = None
    """Milliseconds since the end of the previous batch, without waiting for data or synchronization."""


class RoundMetrics(Message, frozen=True, tag="metrics"):
    """Metrics of one worker over one round."""

    round: U32
    metrics: dict[str, F32]
    """Metric name to value, for example ``loss``."""


class SendingUpdate(Unit, frozen=True, tag="update"):
    """Report that a training worker starts sending its pseudo-gradient."""


class OuterStepTaken(Unit, frozen=True, tag="updated"):
    """Report that the parameter server has taken an outer step."""


class UpdateMerged(Unit, frozen=True, tag="update-received"):
    """Report that a training worker has merged the outer update into its model."""


Progress = BatchDone | RoundMetrics | SendingUpdate | OuterStepTaken | UpdateMerged
ProgressValue = Annotated[Progress, EXTERNAL]


class ProgressRequest(Message, frozen=True):
    """Progress report from the peer that runs a dispatch of the job."""

    job_id: uuid.UUID
    progress: ProgressValue
    lease: Annotated[uuid.UUID | None, OMIT] = None
    """Lease of the dispatch; distinguishes several dispatches of a job on one peer."""
    traceparent: Annotated[str | None, OMIT] = None
    id: Annotated[uuid.UUID | None, OMIT] = None
    """Idempotency key: unchanged when the request is repeated for lack of a response, so that it counts once."""


class Acknowledged(Message, frozen=True, tag="Ok"):
    """Response: the report was recorded."""


class Continue(Message, frozen=True, tag="Continue"):
    """Response: continue."""


class ScheduleUpdate(Message, frozen=True, tag="ScheduleUpdate"):
    """Response: process `counter` more batches, then send the pseudo-gradient."""

    counter: U32


class Done(Message, frozen=True, tag="Done"):
    """Response: the job is complete for this executor, which should exit."""


class ProgressError(Message, frozen=True, tag="Error"):
    """Response: the report does not match the state of the job; the executor should exit."""

    reason: Annotated[str | None, OMIT] = None
    """One line for people."""


ProgressResponse = Acknowledged | Continue | ScheduleUpdate | Done | ProgressError

REPORT: Final = RpcMethod[ProgressRequest, ProgressResponse](PROGRESS, ProgressRequest, ProgressResponse)
