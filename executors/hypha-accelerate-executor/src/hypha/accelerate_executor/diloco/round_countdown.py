"""Decides from the scheduler's answers when a round ends; no I/O.

A worker trains until an answer states how many more batches the round has; it then sends its pseudo-gradient, merges
the outer update, and starts the next round unless the job is done.
"""

from __future__ import annotations

from enum import Enum

from hypha_proto.training_reports import Done, ReportAnswer, ScheduleUpdate


class NextStep(Enum):
    """What the loop does next."""

    TRAIN = "another batch"
    SYNCHRONISE = "send the update of this round"
    STOP = "leave; the job is done"


class RoundCountdown:
    """Counts a round's batches down to its update.

    Attributes:
        round: number of the current round, from 1.
    """

    def __init__(self, first_round: int = 1) -> None:
        """Start before the first batch of `first_round`."""
        self.round = first_round
        self._left: int | None = None

    def after_batch(self, answer: ReportAnswer) -> NextStep:
        """Return the next step after the answer to a batch's report; a newer count replaces the older one."""
        if isinstance(answer, Done):
            return NextStep.STOP
        if isinstance(answer, ScheduleUpdate):
            self._left = answer.counter
        elif self._left is not None:
            self._left -= 1
        return NextStep.SYNCHRONISE if self._left is not None and self._left <= 0 else NextStep.TRAIN

    def without_data(self) -> NextStep:
        """Return the next step when no sample is left: a round whose end was announced still sends its update."""
        return NextStep.STOP if self._left is None else NextStep.SYNCHRONISE

    def after_merge(self, answer: ReportAnswer) -> NextStep:
        """Return the next step after the answer to the merge report: the next round, or the end."""
        if isinstance(answer, Done):
            return NextStep.STOP
        self.round += 1
        self._left = None
        return NextStep.TRAIN
