"""Contributions to the rounds of a DiLoCo job: what an update was computed from, and which outer update is committed.

Sent over ``/hypha-round/0.1.0``. A worker states each update to the scheduler before it sends the update to the
parameter server, and asks the scheduler before it gives an outer update to its executor.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.attempt_id import AttemptId
from hypha_proto.protocols import ROUND, RpcMethod
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message

OPTIMIZER_KEPT: Final = "kept"
"""`Contribution.optimizer`: the inner optimizer continued from its state at the end of the round before."""
OPTIMIZER_RESET: Final = "reset"
"""`Contribution.optimizer`: the inner optimizer began without state."""
MAX_RANGES: Final = 8192
"""Maximum number of ranges in a contribution."""


class SampleRange(Message, frozen=True):
    """Consecutive samples of a slice, in the order that seed, epoch and slice give."""

    epoch: U32
    """Pass over the dataset, from 0."""
    slice: U64
    """Position of the slice in the dataset, from 0."""
    first: U64
    """Position of the first sample in the slice's order, from 0."""
    end: U64
    """Position after the last sample, larger than `first`."""


class Contribution(Message, frozen=True):
    """What an executor states about its update of a round."""

    round: U32
    weights: Digest
    """Digest of the global weights that it began from (`hypha_proto.weights_digest`)."""
    ranges: tuple[SampleRange, ...]
    """Samples that it trained on in this round, in the order of their use."""
    batches: U32
    batch_size: U32
    seed: U64
    """Seed of the random generators in this round."""
    optimizer: str
    """`OPTIMIZER_KEPT` or `OPTIMIZER_RESET`."""
    update: Digest
    """Digest of the update file."""
    micro_batch: Annotated[U32 | None, OMIT] = None
    """Largest number of samples that were computed at once (`TrainConfig.micro_batch`), on which rounding depends; None
    means no limit."""


class StateContribution(Message, frozen=True):
    """Statement of a worker to its scheduler that an executor is about to send an update."""

    attempt: AttemptId
    round: U32
    update: Digest
    """Digest of the update file, computed by the worker."""
    samples: U64 = 0
    """Number of samples that the executor states; 0 if it states none."""
    contribution: Annotated[Contribution | None, OMIT] = None
    """None if the executor states nothing."""
    id: Annotated[uuid.UUID | None, OMIT] = None
    """Idempotency key: unchanged when the request is repeated for lack of a response."""
    traceparent: Annotated[str | None, OMIT] = None


class ContributionKnown(Message, frozen=True):
    """Response to `StateContribution`."""

    accepted: bool
    """Whether the update may be sent to the parameter server; if not, it does not count."""
    reason: str = ""
    """Why it was not accepted."""
    rejoin: Annotated[bool | None, OMIT] = None
    """Whether the round continues without the worker; its executor asks to join again (`job_membership.JoinRound`)."""


class AwaitCommit(Message, frozen=True):
    """Request of a worker: has the scheduler committed a round with this outer update?"""

    attempt: AttemptId
    round: U32
    update: Digest
    """Digest of the outer update that the worker has received."""
    traceparent: Annotated[str | None, OMIT] = None


class CommitStatus(Message, frozen=True):
    """Response to `AwaitCommit`, within some seconds."""

    committed: bool
    """Whether the round record with this outer update is on disk. If not, the worker asks again, unless `reason`."""
    reason: str = ""
    """Why this outer update will never be committed; empty if it may still be."""
    weights: Annotated[Digest | None, OMIT] = None
    """Digest of the global weights after the round."""


STATE_CONTRIBUTION: Final = RpcMethod(ROUND, StateContribution, ContributionKnown, "StateContribution")
AWAIT_COMMIT: Final = RpcMethod(ROUND, AwaitCommit, CommitStatus, "AwaitCommit")
