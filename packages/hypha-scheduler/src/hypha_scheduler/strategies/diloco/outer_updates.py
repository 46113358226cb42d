"""The files that a job's peers push to the scheduler and pull from it: outer updates, weights and momentum. Pure.

A pushed outer update becomes a record by `commit`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hypha_net.transfer import PullSource
from hypha_proto.texts import quote
from hypha_proto.transfer import NO_ROOM, OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_scheduler.jobs.artifacts import artifact_dataset
from hypha_scheduler.strategies.base import PushTarget, TaskRef, not_served
from hypha_scheduler.strategies.diloco.commit import RoundCommits
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.running_job import RunningJob
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, LAST_UPDATE, MOMENTUM, WEIGHTS


@dataclass(frozen=True, slots=True)
class JobFails:
    """A push after which the job cannot go on."""

    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A push for which the disk has no room now."""

    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class OuterUpdateFiles:
    """Files of one job."""

    job_id: uuid.UUID
    directory: Path
    result: ResultModel
    commits: RoundCommits

    def find(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Serve the newest weights and the last outer update, and the momentum to the parameter server."""
        path = self._sources(task).get(request.dataset, lambda: None)()
        if path is None or request.index != 0:
            return not_served(request)
        return PullSource(path)

    def _sources(self, task: TaskRef) -> dict[str, Callable[[], Path | None]]:
        sources: dict[str, Callable[[], Path | None]] = {
            WEIGHTS: self.result.weights_file,
            LAST_UPDATE: self.result.update_file,
        }
        if task.lease.role == AGGREGATE:
            sources[MOMENTUM] = self.result.momentum_file
        return {artifact_dataset(self.job_id, name): source for name, source in sources.items()}

    def receive(
        self, running: RunningJob | None, task: TaskRef, header: PushHeader
    ) -> PushTarget | Refusal | NoRoom | JobFails:
        """Return where the next outer update of the parameter server may be written."""
        if running is None or task.lease.role != AGGREGATE:
            return Refusal(reason="only the job's parameter server may push to its scheduler")
        if task != running.server:
            return Refusal(reason="another peer is the job's parameter server now")
        if header.kind != OUTER_UPDATE:
            return Refusal(reason=f"a scheduler accepts {OUTER_UPDATE}, not {quote(header.kind)}")
        if header.term is not None and header.term != running.term:
            return Refusal(reason=f"term {header.term} is over: the parameter server is of term {running.term}")
        return self._receive_round(running, header)

    def _receive_round(self, running: RunningJob, header: PushHeader) -> PushTarget | Refusal | NoRoom | JobFails:
        expected = self.commits.last + 1
        number = header.round
        if number < expected and not self.commits.is_last(number, header.digest):
            return Refusal(reason=f"the outer update of round {number} was already received")
        if number > expected:
            why = f"the outer update of round {expected} never came: the parameter server sends that of {number}"
            return JobFails(Refusal(reason=f"the outer update of round {expected} is missing"), why)
        has_term = header.term is not None
        if has_term and not running.training.rounds.is_announced(number):
            return Refusal(reason=f"the members of round {number} were not announced")
        if lacking := self.result.lacks_room(header.size):
            return NoRoom(Refusal(reason=f"{NO_ROOM} for the outer update at the scheduler"), lacking)
        name = f"round-{number}-{uuid.uuid4().hex[:8]}.safetensors"
        server = running.server
        prepare = partial(
            self.commits.prepare,
            number,
            running.term,
            lambda: running.announcer.is_settled,
            lambda: running.server == server,
        )
        return PushTarget(self.directory / "updates" / name, self.result.largest_update(), prepare)
