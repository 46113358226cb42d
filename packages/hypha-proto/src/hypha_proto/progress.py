"""How a job advances: an executor's reports, and what the scheduler has it do next."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.protocols import PROGRESS, RpcMethod
from hypha_proto.wire_schema import EXTERNAL, F32, OMIT, U32, Message, Unit


class BatchDone(Message, frozen=True, tag="status"):
    """One batch was processed."""

    batch_size: U32
    """Samples in it."""
    slices: Annotated[dict[str, U32] | None, OMIT] = None
    """Slice index (text) to the number of samples that the batch took from it."""
    batch_ms: Annotated[float | None, OMIT] = None
    """Time from the end of the batch before (waiting for data and synchronisation apart), milliseconds."""


class RoundMetrics(Message, frozen=True, tag="metrics"):
    """What was measured over a round."""

    round: U32
    metrics: dict[str, F32]


class SendingUpdate(Unit, frozen=True, tag="update"):
    """A training worker starts to send its pseudo-gradient."""


class OuterStepTaken(Unit, frozen=True, tag="updated"):
    """The parameter server has taken an outer step."""


class UpdateMerged(Unit, frozen=True, tag="update-received"):
    """A training worker has merged the outer update."""


Progress = BatchDone | RoundMetrics | SendingUpdate | OuterStepTaken | UpdateMerged
ProgressValue = Annotated[Progress, EXTERNAL]


class ProgressRequest(Message, frozen=True):
    """A report about a job, from the peer that runs a dispatch of it."""

    job_id: uuid.UUID
    progress: ProgressValue
    lease: Annotated[uuid.UUID | None, OMIT] = None
    """The dispatch's lease, where one peer holds several of a job."""
    traceparent: Annotated[str | None, OMIT] = None
    id: Annotated[uuid.UUID | None, OMIT] = None
    """Of this request: the same when it is sent again because no answer came, so that it counts once."""


class Acknowledged(Message, frozen=True, tag="Ok"):
    """Noted."""


class Continue(Message, frozen=True, tag="Continue"):
    """Go on."""


class ScheduleUpdate(Message, frozen=True, tag="ScheduleUpdate"):
    """Process `counter` more batches, then send the pseudo-gradient."""

    counter: U32


class Done(Message, frozen=True, tag="Done"):
    """The job is over for this executor: exit."""


class ProgressError(Message, frozen=True, tag="Error"):
    """The report does not fit; the executor should end."""


ProgressResponse = Acknowledged | Continue | ScheduleUpdate | Done | ProgressError

REPORT: Final = RpcMethod[ProgressRequest, ProgressResponse](PROGRESS, ProgressRequest, ProgressResponse)
