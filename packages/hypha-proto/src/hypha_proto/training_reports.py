"""Reports of executors that train, and the scheduler's answers, which say what to do next."""

from __future__ import annotations

import uuid
from typing import Annotated, Final, cast

from hypha_proto.attempt_id import AttemptId
from hypha_proto.protocols import PROGRESS, RpcMethod
from hypha_proto.wire_schema import EXTERNAL, F32, OMIT, U32, Message, Unit


class TrainedBatch(Message, frozen=True):
    """One batch that an executor has processed."""

    batch_size: U32
    """Number of samples in the batch."""
    slices: Annotated[dict[str, U32] | None, OMIT] = None
    """Number of samples taken from each slice; keys are slice indexes as decimal text."""
    batch_ms: Annotated[float | None, OMIT] = None
    """Milliseconds since the end of the previous batch, without waiting for data, answers or synchronization."""
    wait_ms: Annotated[float | None, OMIT] = None
    """Milliseconds that the executor has waited for the data of this batch."""


class BatchDone(TrainedBatch, frozen=True, tag="status"):
    """Report that one batch was processed."""


MICRO_BATCH: Final = "micro_batch"
"""Metric of `RoundMetrics`: largest number of samples of a batch that the worker has computed at once. Alone, it is
reported before the first batch, if memory limits it."""
COMPUTE_SECONDS: Final = "compute_seconds"
"""Metric of `RoundMetrics`: seconds in which the worker has trained batches of the round."""
DATA_WAIT_SECONDS: Final = "data_wait_seconds"
"""Metric of `RoundMetrics`: seconds in which the worker has waited for samples of the round."""
REPORT_WAIT_SECONDS: Final = "report_wait_seconds"
"""Metric of `RoundMetrics`: seconds in which the worker has waited for answers to reports of batches."""
SYNC_SECONDS: Final = "sync_seconds"
"""Metric of `RoundMetrics`: seconds from the last batch of the round before to the beginning of this one. The first
round of a process has none, and what follows the job's last round is not reported."""
ROUND_SECONDS: Final = (COMPUTE_SECONDS, DATA_WAIT_SECONDS, REPORT_WAIT_SECONDS, SYNC_SECONDS)
"""Metrics that say where the time of a worker has gone. Together they are the time from its first batch to its last."""


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


TrainingReport = BatchDone | RoundMetrics | SendingUpdate | OuterStepTaken | UpdateMerged
TrainingReportValue = Annotated[TrainingReport, EXTERNAL]


class ReportTraining(Message, frozen=True):
    """Report of an executor, from the peer that runs its task."""

    attempt: AttemptId
    progress: TrainingReportValue
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


class ReportError(Message, frozen=True, tag="Error"):
    """Response: the report does not match the state of the job; the executor should exit."""

    reason: Annotated[str | None, OMIT] = None
    """One line for people."""


ReportAnswer = Acknowledged | Continue | ScheduleUpdate | Done | ReportError

REPORT: Final = RpcMethod(PROGRESS, ReportTraining, cast(type[ReportAnswer], ReportAnswer))
