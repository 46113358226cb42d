"""Training state of a DiLoCo job: rounds, slices and totals, and the response to each report of an executor. Pure.

Combines `slices` and `rounds`. `operator` asks it for a response and effects for each report, and for a slice for each
request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.datasets import UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.progress import (
    Acknowledged,
    BatchDone,
    Done,
    OuterStepTaken,
    Progress,
    ProgressError,
    ProgressResponse,
    RoundMetrics,
    SendingUpdate,
)
from hypha_scheduler.strategies.diloco.rounds import Effect, Left, Measured, RoundClosed, Rounds
from hypha_scheduler.strategies.diloco.slices import Assignment, SliceLedger

_METRICS: Final = 64
"""Maximum number of metrics taken from one report."""


@dataclass(slots=True)
class TrainingState:
    """What workers have trained and are to train, from the start of the first round."""

    rounds: Rounds
    slices: SliceLedger
    server: PeerId
    samples: Counter[PeerId] = field(default_factory=Counter)
    """Samples of each worker in closed rounds."""
    batches: Counter[PeerId] = field(default_factory=Counter)
    """Batches of each worker in closed rounds."""
    loss: float | None = None
    """Loss of the last closed round."""
    told_done: set[PeerId] = field(default_factory=set)
    """Peers to which `Done` was sent."""
    set_aside: dict[int, UnusableSlice] = field(default_factory=dict)
    """Slices that were set aside, by index, with the first report of each."""
    lost: dict[PeerId, str] = field(default_factory=dict)
    """Why each lost worker was lost."""
    left: set[PeerId] = field(default_factory=set)
    """Draining workers that have left after a round."""

    def slice_for(self, peer: PeerId, now: float) -> Assignment | None:
        """Assign the next slice to a worker; None if the peer is not (or no longer) a member.

        Raises:
            LedgerFullError: the worker holds too many unused slices.
            NoUsableSliceError: every slice was set aside.
        """
        if peer not in self.rounds.members:
            return None
        self.rounds.training_began(peer, now)
        return self.slices.assign(peer)

    def slice_unusable(self, peer: PeerId, report: UnusableSlice) -> bool:
        """Set a slice aside that a worker cannot get from any provider; return False if it was not assigned to it."""
        if not self.slices.set_aside(peer, report.index, report.epoch):
            return False
        self.set_aside.setdefault(report.index, report)
        return True

    def report(self, peer: PeerId, progress: Progress, now: float) -> tuple[ProgressResponse, tuple[Effect, ...]]:
        """Process the report of an executor; return the response, and the effects to apply."""
        if peer == self.server:
            answer, effects = self._server_report(progress, now)
        else:
            answer, effects = self._worker_report(peer, progress, now)
        if isinstance(answer, Done):
            self.told_done.add(peer)
        if isinstance(answer, ProgressError) and answer.reason is None:
            answer = ProgressError(reason=self._refusal_reason(peer, progress))
        return answer, self._count(effects)

    def _refusal_reason(self, peer: PeerId, progress: Progress) -> str:
        """Return why a report does not match the state of the job."""
        name = type(progress).__name__
        if peer == self.server:
            early = "no round was announced to it yet"
            return early if isinstance(progress, OuterStepTaken) else f"a parameter server does not report {name}"
        if isinstance(progress, OuterStepTaken):
            return "only the parameter server takes outer steps"
        if peer in self.lost:
            return f"the job continues without this worker: {self.lost[peer]}"
        if peer in self.left:
            return "the job continues without this worker, which has left because it drains"
        if peer not in self.rounds.members:
            return "this worker is not a member of the job"
        return f"{name} came before the parameter server was told to take the outer step"

    def _server_report(self, progress: Progress, now: float) -> tuple[ProgressResponse, tuple[Effect, ...]]:
        if isinstance(progress, OuterStepTaken):
            return self.rounds.outer_step_taken(now)
        return (Acknowledged() if isinstance(progress, RoundMetrics) else ProgressError()), ()

    def _worker_report(
        self, peer: PeerId, progress: Progress, now: float
    ) -> tuple[ProgressResponse, tuple[Effect, ...]]:
        if isinstance(progress, BatchDone):
            self.slices.report(peer, _slice_counts(progress.slices))
            seconds = None if progress.batch_ms is None else progress.batch_ms / 1000
            return self.rounds.batch_done(peer, progress.batch_size, now, seconds), ()
        if isinstance(progress, SendingUpdate):
            return Done() if self.rounds.is_excused(peer) else Acknowledged(), self.rounds.update_started(peer, now)
        if isinstance(progress, RoundMetrics):
            return Acknowledged(), self._measured(peer, progress)
        if isinstance(progress, OuterStepTaken):
            return ProgressError(), ()
        return self._update_merged(peer, now)

    def _update_merged(self, peer: PeerId, now: float) -> tuple[ProgressResponse, tuple[Effect, ...]]:
        number = self.rounds.round_of(peer)
        answer = self.rounds.update_merged(peer, now)
        if number is None or peer in self.rounds.members:
            return answer, ()
        self.slices.release(peer)
        self.left.add(peer)
        return answer, (Left(peer, number),)

    def _measured(self, peer: PeerId, report: RoundMetrics) -> tuple[Effect, ...]:
        values = {n[:100]: v for n, v in list(report.metrics.items())[:_METRICS] if math.isfinite(v)}
        if (
            "evaluation_loss" in values and "loss" not in values
        ):  # a second report of the round, with evaluation metrics
            return (Measured(peer, report.round, values),)
        return (
            Measured(peer, report.round, values),
            *self.rounds.metrics_reported(peer, report.round, values.get("loss")),
        )

    def _count(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        for effect in effects:
            if isinstance(effect, RoundClosed):
                self.samples.update(effect.samples)
                self.batches.update(effect.batches)
                self.loss = effect.loss
        return effects

    def worker_lost(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Remove a lost worker; its unused slices are assigned to others."""
        self.slices.release(peer)
        self.lost.setdefault(peer, why)
        return self._count(self.rounds.worker_lost(peer, why, now))

    def update_refused(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update the parameter server refused."""
        return self._count(self.rounds.update_refused(number, peer, reason, now))

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Apply deadlines that have passed."""
        return self._count(self.rounds.expire(now))

    def finish(self) -> tuple[Effect, ...]:
        """Close the remaining rounds at the end of the job."""
        return self._count(self.rounds.finish())


def _slice_counts(slices: Mapping[str, int] | None) -> dict[int, int] | None:
    """Convert slice indexes to numbers and drop malformed ones."""
    if slices is None:
        return None
    return {int(name): samples for name, samples in slices.items() if name.isascii() and name.isdigit()}
