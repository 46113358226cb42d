"""Reports of several batches at once, which executors send in the background while they train on.

Sent over ``/hypha-progress/0.1.0`` to schedulers of jobs with rounds; others get one `training_reports.BatchDone` per
batch. Positions are absolute within a round, so a lost, duplicate or late message changes nothing: the scheduler skips
batches that it has counted, and executors send others again.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from hypha_proto.attempt_id import AttemptId
from hypha_proto.protocols import BATCH_REPORTS, RpcMethod
from hypha_proto.training_reports import BatchDone, TrainedBatch
from hypha_proto.wire_schema import OMIT, U32, Message

MAX_BATCHES: Final = 256
"""Maximum number of reports in one message."""


class TrainedBatches(Message, frozen=True):
    """Consecutive batches of one executor in a round. Request body of ``/status/batches``."""

    round: U32
    first: U32
    """Number of batches that the executor has trained in this round before these."""
    batches: tuple[TrainedBatch, ...]
    """The batches in their order, 1 to `MAX_BATCHES`."""
    last: Annotated[U32 | None, OMIT] = None
    """Number of batches of the round after which the executor will send its update; None if it does not know yet. It
    trains on if the answer to the report of the last of them names a larger number."""
    settles: Annotated[bool | None, OMIT] = None
    """True if an answer that names the same `last` is final: the executor then sends its update after that batch and
    waits for no later answer."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.batches) <= MAX_BATCHES:
            raise ValueError(f"batches: {len(self.batches)} reports; expected 1 to {MAX_BATCHES}")


class ReportBatches(TrainedBatches, frozen=True, kw_only=True):
    """Report of a training worker to its scheduler."""

    attempt: AttemptId


class BatchesCounted(Message, frozen=True):
    """Response to `ReportBatches`, also of the route ``/status/batches``."""

    counted: U32
    """Number of batches of the round that need not be reported again. A worker whose scheduler does not answer states
    the report's own `first`: nothing of it was counted."""
    last: Annotated[U32 | None, OMIT] = None
    """Number of batches of the round after which the executor sends its update; None if it is not known yet."""
    done: Annotated[bool | None, OMIT] = None
    """True if the job no longer needs the executor, which should exit."""
    reason: str = ""
    """Why the report contradicts the state of the job, one line; the executor should exit. Empty if it does not."""


def report_of(batch: TrainedBatch) -> BatchDone:
    """Return the report of a single batch, for peers that take one at a time."""
    return BatchDone(**msgspec.structs.asdict(batch))


REPORT_BATCHES: Final = RpcMethod(BATCH_REPORTS, ReportBatches, BatchesCounted, "ReportBatches")
