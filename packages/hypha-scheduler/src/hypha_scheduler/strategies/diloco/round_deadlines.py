"""Deadlines of the open round: when a worker is suspected, gone on without, or replaced. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.events import suspected_event
from hypha_scheduler.strategies.diloco.members import Roster, RoundMember, Standing
from hypha_scheduler.strategies.diloco.open_round import Round
from hypha_scheduler.strategies.diloco.round_effects import Overdue, RoundSettings
from hypha_scheduler.strategies.diloco.timeouts import EVALUATION, FACTOR
from hypha_scheduler.strategies.silence import PATIENCE, suspicious_after

_LEAST_AWAY: Final = 10.0
"""Least time in seconds for which a paused job waits for a worker that was late."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Silence of a worker for which a round waits."""

    since: float
    suspected_at: float
    explained_until: float
    """Time until which its own last reports explain it."""
    patience: float = 0.0
    """Longest time in seconds for which a round that waits for suspected workers only waits beyond that."""

    def late_at(self, began_at: float, waiting: int) -> float:
        """Return when a round that waits for suspected workers only goes on without it.

        The `waiting` others lose no more time than the worker has trained in the round, which began at `began_at`.
        """
        return self.explained_until + min(self.patience, max(0.0, self.since - began_at) / max(1, waiting))


@dataclass(slots=True)
class RoundDeadlines:
    """Deadlines of one job's rounds."""

    settings: RoundSettings
    roster: Roster
    rounds: Mapping[int, Round]
    first: int
    """First round of this run."""

    def updates_wait(self) -> float:
        """Return how long the parameter server waits for updates that workers have started to send.

        Steps include the transfer of updates, and some links are slower in that direction.
        """
        timeouts = self.settings.timeouts
        return self.settings.timeout or max(timeouts.merge_timeout(), timeouts.step_timeout())

    # --------------------------------------------------------------------------------------------------------- silence

    def silence_of(self, peer: PeerId, current: Round) -> Silence | None:
        """Return how long a worker for which a round waits may be silent; None if its rhythm is not known."""
        member, part = self.roster.members[peer], current.parts.get(peer)
        per_sample = member.throughput.seconds_per_sample
        if not member.has_trained or per_sample is None:
            return None
        batch = max(per_sample * self.settings.batch_size, member.rhythm.usual_interval)
        if part is not None and part.sending_at is not None:
            return self._step_silence(max(part.sending_at, member.seen_at), batch, member.rhythm.sendings)
        if member.round < current.number:
            since = max(self._merges_since(current), member.seen_at)
            if not self.is_evaluated(current.number - 1):
                return self._step_silence(since, batch, member.rhythm.merges)
            evaluation = self.evaluation_timeout(current.number - 1, [member])
            return self._step_silence(since, batch, member.rhythm.evaluated_merges, evaluation)
        since = max(member.seen_at, current.began_at)
        return self._silence(since, batch, max(batch, member.rhythm.longest_batch))

    def _step_silence(self, since: float, batch: float, known: Collection[float], evaluation: float = 0.0) -> Silence:
        """Return the silence of a worker that sends its update or merges an outer one.

        Args:
            since: since when it is silent.
            batch: seconds of its batches.
            known: how long it took the last times.
            evaluation: how much longer it may take the first time.
        """
        if not known:
            until = since + max(suspicious_after(batch), self.settings.timeouts.merge_timeout()) + evaluation
            return Silence(since, until, until)
        usual = max(batch, *known)
        return self._silence(since, usual, usual)

    def _silence(self, since: float, usual: float, longest: float) -> Silence:
        explained = suspicious_after(longest)
        return Silence(since, since + suspicious_after(usual), since + explained, (PATIENCE - 1.0) * explained)

    def is_evaluated(self, number: int) -> bool:
        """Return whether workers evaluate the weights after a round."""
        return self.settings.evaluate_every > 0 and number % self.settings.evaluate_every == 0

    def evaluation_timeout(self, number: int, members: Iterable[RoundMember]) -> float:
        """Return the seconds that workers may take to evaluate the weights after a round; 0 if nobody does.

        A sample takes no longer to evaluate than to train.
        """
        if not self.is_evaluated(number):
            return 0.0
        samples, timeout = self.settings.evaluation_samples, 0.0
        for member in members:
            seconds = member.throughput.seconds_per_sample
            if samples is None or seconds is None:
                return EVALUATION
            timeout = max(timeout, FACTOR * samples * seconds)
        return timeout

    def _merges_since(self, current: Round) -> float:
        before = self.rounds.get(current.number - 1)
        return current.began_at if before is None or before.closed_at is None else before.closed_at

    def suspicions(self, current: Round | None) -> dict[PeerId, float]:
        """Return when each worker for which the open round waits will be suspected, if it stays silent."""
        if current is None or current.announced_at is not None:
            return {}
        unsuspected = [p for p in self.roster.missing(current) if not self.roster.members[p].is_suspected]
        found = {peer: self.silence_of(peer, current) for peer in unsuspected}
        return {peer: silence.suspected_at for peer, silence in found.items() if silence is not None}

    def suspect(self, current: Round, now: float) -> tuple[EmitEvent, ...]:
        """Suspect workers that have been silent for too long."""
        effects: list[EmitEvent] = []
        for peer, at in self.suspicions(current).items():
            silence = self.silence_of(peer, current)
            if at > now or silence is None:
                continue
            self.roster.members[peer].is_suspected = True
            effects.append(suspected_event(peer, current.number, now - silence.since))
        return tuple(effects)

    def _silent_until(self, current: Round) -> float | None:
        """Return when a round goes on without suspected workers; None as long as it waits for others or needs them.

        It does not need them if others ask to join, which then take their places.
        """
        missing = self.roster.missing(current)
        waiting = len(self.roster.expected(current)) - len(missing)
        present = waiting + self.roster.count_asking()
        if present < self.roster.least(current) or not all(self.roster.members[peer].is_suspected for peer in missing):
            return None
        found = [self.silence_of(peer, current) for peer in missing]
        late = (silence.late_at(current.counted_from, waiting) for silence in found if silence is not None)
        return max(late, default=None)

    # ----------------------------------------------------------------------------------------------------------- round

    def of_round(self, current: Round) -> float | None:
        """Return the time at which the parameter server, or workers of the open round, are overdue."""
        if current.announced_at is not None:
            return current.announced_at + self.updates_wait() + self.settings.timeouts.step_timeout()
        if not self.roster.missing(current):
            return None
        due = max([self._training_deadline(current), *self._sending_until(current)])
        silent = self._silent_until(current)
        return due if silent is None else min(due, silent)

    def _sending_until(self, current: Round) -> list[float]:
        """Return until when each worker that sends its update may do so."""
        wait = self.settings.timeout or self.settings.timeouts.merge_timeout()
        sending = [part.sending_at for part in current.parts.values() if part.posted_at is None and part.sending_at]
        return [at + wait for at in sending]

    def _training_deadline(self, current: Round) -> float:
        """Return the time until which the members of a round may train."""
        began = current.trains_at if current.number == self.first else current.began_at
        if self.settings.timeout is not None and began is not None:  # starting executors have a timeout of their own
            return began + self.settings.timeout
        missing = [self.roster.members[peer] for peer in self.roster.missing(current)]
        starting = any(not member.has_trained for member in missing)
        if current.finish is None or starting:
            seen = [current.began_at, *(member.seen_at for member in missing if member.has_trained)]
            due = (current.began_at if starting else max(seen)) + self.settings.timeouts.start_timeout()
        else:
            due = current.finish + max(self.settings.grace, current.finish - current.began_at)
        if behind := [member for member in missing if member.round < current.number]:
            due = max(due, self._merging_until(self._merges_since(current), current.number - 1, behind))
        return due

    def of_merging(self, last: Round) -> float:
        """Return the time at which workers that have not merged the outer update of a closed round are overdue."""
        merging = [member for member in self.roster.members.values() if not member.done and member.round <= last.number]
        return self._merging_until(last.closed_at or last.began_at, last.number, merging)

    def _merging_until(self, since: float, number: int, members: Iterable[RoundMember]) -> float:
        """Return until when members may merge the outer update of a round, and evaluate the weights."""
        return since + self.settings.timeouts.merge_timeout() + self.evaluation_timeout(number, members)

    # ----------------------------------------------------------------------------------------------------- replacement

    def replacements(self, *, is_paused: bool) -> dict[PeerId, float]:
        """Return when each worker that does not begin, or does not come back while the job waits, is replaced."""
        found = {
            peer: self._replaced_at(member, is_paused=is_paused)
            for peer, member in self.roster.members.items()
            if not member.is_overdue
        }
        return {peer: at for peer, at in found.items() if at is not None}

    def _replaced_at(self, member: RoundMember, *, is_paused: bool) -> float | None:
        if member.standing in (Standing.PREPARING, Standing.JOINED):
            return max(member.since, member.seen_at) + self.settings.timeouts.start_timeout()
        if member.standing is Standing.AWAY and is_paused:
            return max(member.since, member.seen_at) + max(
                _LEAST_AWAY, 2 * member.waited
            )  # it was waited for once before it was late
        return None

    def replace_workers(self, now: float, *, is_paused: bool) -> tuple[Overdue, ...]:
        """Ask for others in place of workers that are overdue."""
        effects: list[Overdue] = []
        for peer, at in self.replacements(is_paused=is_paused).items():
            if at > now:
                continue
            member = self.roster.members[peer]
            member.is_overdue = True
            what = "it has not come back" if member.standing is Standing.AWAY else "it has not begun to train"
            effects.append(Overdue(peer, f"{what} within {now - member.since:.0f} s"))
        return tuple(effects)
