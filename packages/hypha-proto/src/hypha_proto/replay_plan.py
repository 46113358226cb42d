"""Plan of a replay: what an executor needs to compute the rounds of a DiLoCo job again, from the scheduler's record.

`hypha-scheduler replay` writes it as JSON and starts the executor's command with its path. It names files of this
machine and is sent to nobody.
"""

from __future__ import annotations

import uuid
from typing import Final

from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Nesterov, TrainConfig
from hypha_proto.wire_schema import U32, U64, Digest, Message

FORMAT: Final = 1
"""Version of the plan."""


class RecordedUpdate(Message, frozen=True):
    """An update as the record has it."""

    peer: PeerId
    samples: U64
    """Its weight in the mean; 0 if it did not count."""
    update: Digest | None = None
    """Digest of the update file; None if it is not known."""
    contribution: Contribution | None = None
    """What it was computed from; None if its executor stated nothing."""
    member: U32 | None = None
    """Number of the worker in the job, from which the seeds of its random generators follow; None if unknown."""


class RecordedRound(Message, frozen=True, kw_only=True):
    """One round of the record."""

    round: U32
    run: U32
    """Position in `ReplayPlan.runs` of the settings that it was computed with."""
    members: tuple[RecordedUpdate, ...]
    """Updates in the mean, in its order."""
    unused: tuple[RecordedUpdate, ...] = ()
    """Updates that did not count: late or refused. They changed the optimizer state of their workers."""
    update: Digest
    """Digest of the outer update."""
    weights_before: Digest | None = None
    """Digest of the global weights before the round (`weights_digest`); None if it was not recorded."""
    weights: Digest
    """Digest of the global weights after the round."""
    kept: str | None = None
    """File of the outer update, if the job has kept it."""


class Run(Message, frozen=True):
    """Settings of consecutive rounds; a job that was resumed, or has had several parameter servers, has several."""

    train: TrainConfig
    """Configuration of the training workers; its references are not followed."""
    outer: Nesterov


class SliceFile(Message, frozen=True):
    """A slice of the dataset."""

    index: U64
    path: str


class ReplayPlan(Message, frozen=True, kw_only=True):
    """A job to compute again."""

    format: U32
    job_id: uuid.UUID
    model: str
    """Directory of the start model."""
    preprocessor: str | None = None
    """Directory of the preprocessor, if the job has one."""
    slices: tuple[SliceFile, ...]
    """Slices that the ranges of the record name."""
    runs: tuple[Run, ...]
    rounds: tuple[RecordedRound, ...]
    """Consecutive rounds, from 1."""
    threads: U32 | None = None
    """Threads to compute with; None keeps what the environment says."""
    tolerance: float
    """Largest difference of an outer update that counts as rounding, as a fraction of its largest number."""
