"""Settings of a job's rounds, and the effects that `rounds` returns. Pure; `operator` translates all but events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings of the rounds of a job."""

    rounds: int
    """Number of rounds."""
    target: int
    """Samples of all workers per round."""
    batch_size: int
    """Samples per batch of a worker."""
    min_members: int
    """Number of workers without which the job pauses."""
    timeout: float | None = None
    """Maximum duration of a round in seconds; None to derive it from the forecast."""
    grace: float = 30.0
    """Minimum time in seconds beyond the forecast before a member counts as late."""
    evaluate_every: int = 0
    """Number of rounds between evaluations of the weights; 0 for none."""
    evaluation_samples: int | None = None
    """Samples that one worker evaluates at most; None if that is not known."""
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(0, 600.0, 600.0, 600.0))
    """Timeouts of steps without a forecast: starting an executor, an outer step, merging it."""


@dataclass(frozen=True, slots=True)
class AnnounceRound:
    """Effect: announce to the parameter server whose updates to average."""

    round: int
    members: tuple[tuple[PeerId, int], ...]
    """Peer and number of samples of each member."""
    seconds: float | None = field(default=None, compare=False)
    """How long the parameter server waits for updates that have not arrived."""


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Effect: report a closed round."""

    round: int
    samples: Mapping[PeerId, int]
    batches: Mapping[PeerId, int]
    waits: Mapping[PeerId, float]
    """Seconds from each worker's update until the round waited for no further one: the last came, or was given up."""
    seconds: float
    """Duration to the outer step; the first round begins when the first worker begins its first batch."""
    loss: float | None
    """Mean loss over workers, weighted by samples; None if no worker reported one."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: fail the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Effect: pause the job, whose disk has no room for an outer update."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartReady:
    """Effect: start the tasks whose inputs exist."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Effect: report the metrics of a worker over a round."""

    peer: PeerId
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Left:
    """Effect: report that a draining worker has left after a round in which its update counts."""

    peer: PeerId
    round: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Effect: report that a worker begins with a round: it is new, was late, or its executor was started again."""

    peer: PeerId
    round: int


@dataclass(frozen=True, slots=True)
class Overdue:
    """Effect: release a worker, which has missed too many rounds or does not begin, and replace it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class StepOverdue:
    """Effect: replace the parameter server, which has not taken an outer step in time; it counts as lost already."""

    reason: str


Effect = EmitEvent | AnnounceRound | RoundClosed | Measured | Left | Fail | Joined | Overdue | StepOverdue
