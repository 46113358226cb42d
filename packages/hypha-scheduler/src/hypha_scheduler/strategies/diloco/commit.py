"""Commits of rounds: outer updates become global weights, and workers hear which of them count.

An outer update counts once the round record that names its digest is on disk. Until then no worker merges it, so that
after a crash of this scheduler nobody has weights that the record does not have.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from hypha_net.errors import TransferRefusedError
from hypha_net.transfer import PullSource
from hypha_proto.contributions import AwaitCommit, CommitStatus
from hypha_proto.texts import quote
from hypha_proto.transfer import NO_ROOM, OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_scheduler.errors import lacks_room, waits_for_room
from hypha_scheduler.jobs.artifacts import artifact_dataset
from hypha_scheduler.jobs.effect_queue import ROOM_INTERVAL
from hypha_scheduler.strategies.base import JobContext, PushTarget, RetryAfter, TaskRef, not_served
from hypha_scheduler.strategies.diloco.restore import CommittedRound
from hypha_scheduler.strategies.diloco.result_model import UPDATES, ResultModel
from hypha_scheduler.strategies.diloco.round_effects import Fail, NoRoom
from hypha_scheduler.strategies.diloco.running_job import RunningJob
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, LAST_UPDATE, MOMENTUM, WEIGHTS

if TYPE_CHECKING:
    from hypha_proto.global_model import RoundState

PAUSED: Final = "paused"
"""Notice that the disk has no room for the weights of a round; its message is the reason."""
CONTINUED: Final = "continued"
"""Notice that there is room again; its message is for how many seconds there was none."""
_SETTLE_TIMEOUT: Final = 300.0
"""Seconds for the parameter server to say who is a member."""
_ASK_AGAIN: Final = 10.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class RoundCommits:
    """The committed rounds of one job, and the one that is about to be."""

    context: JobContext
    """Gets the notices `PAUSED` and `CONTINUED`."""
    result: ResultModel
    rounds: dict[int, CommittedRound]
    """Recorded rounds by their numbers."""
    _advance: tuple[int, int, RoundState] | None = None
    """Term and number of the round whose weights are on disk, and which is not recorded."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _changed: anyio.Event | None = None

    @property
    def last(self) -> int:
        """Last recorded round; 0 before the first."""
        return max(self.rounds, default=0)

    @property
    def is_settled(self) -> bool:
        """Whether the weights after the last recorded round are those of the job on disk, too."""
        return self.result.round >= self.last

    @property
    def update(self) -> str | None:
        """Digest of the outer update of the last recorded round; None before the first."""
        found = self.rounds.get(self.last)
        return None if found is None else found.update

    def weights_before(self, number: int) -> str | None:
        """Return the digest of the weights with which a round begins; None if it is not known."""
        before = self.rounds.get(number - 1)
        return None if before is None else before.weights

    # ----------------------------------------------------------------------------------------------------------- files

    def find(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Serve the newest weights and the last outer update, and the momentum to the parameter server."""
        sources = {WEIGHTS: self.result.weights_file, LAST_UPDATE: self.result.update_file}
        if task.lease.role == AGGREGATE:
            sources[MOMENTUM] = self.result.momentum_file
        named = {artifact_dataset(self.context.job_id, name): source for name, source in sources.items()}
        path = named[request.dataset]() if request.dataset in named and request.index == 0 else None
        return not_served(request) if path is None else PullSource(path)

    def receive(
        self, running: RunningJob | None, task: TaskRef, header: PushHeader
    ) -> tuple[PushTarget | Refusal, tuple[NoRoom | Fail, ...]]:
        """Return where the next outer update of the parameter server may be written."""
        if running is None or task.lease.role != AGGREGATE:
            return Refusal(reason="only the job's parameter server may push to its scheduler"), ()
        if task != running.server:
            return Refusal(reason="another peer is the job's parameter server now"), ()
        if header.kind != OUTER_UPDATE:
            return Refusal(reason=f"a scheduler accepts {OUTER_UPDATE}, not {quote(header.kind)}"), ()
        if header.term is not None and header.term != running.term:
            why = f"term {header.term} is over: the parameter server is of term {running.term}"
            return Refusal(reason=why), ()
        number, expected = header.round, self.last + 1
        is_last = number == self.last and self.update == header.digest  # it comes again for lack of a receipt
        if number < expected and not is_last:
            return Refusal(reason=f"the outer update of round {number} was already received"), ()
        if number > expected:
            why = f"the outer update of round {expected} never came: the parameter server sends that of {number}"
            return Refusal(reason=f"the outer update of round {expected} is missing"), (Fail(why),)
        if header.term is not None and not running.training.rounds.is_announced(number):
            return Refusal(reason=f"the members of round {number} were not announced"), ()
        if lacking := self.result.lacks_room(header.size):
            return Refusal(reason=f"{NO_ROOM} for the outer update at the scheduler"), (NoRoom(lacking),)
        name = f"round-{number}-{uuid.uuid4().hex[:8]}.safetensors"
        prepare = partial(self.prepare, running, task, running.term, number)
        return PushTarget(self.context.directory / UPDATES / name, self.result.largest_update(), prepare), ()

    # --------------------------------------------------------------------------------------------------------- commits

    async def prepare(self, running: RunningJob, server: TaskRef, term: int, number: int, update: Path) -> None:
        """Write the weights after a round to disk, once its members are known, waiting for room if there is none.

        Args:
            running: the job.
            server: the parameter server that has sent the outer update.
            term: its term.
            number: the round.
            update: file of the outer update.

        Raises:
            JobFailedError: the update does not fit the model.
            TransferRefusedError: the members stay unknown, or the parameter server was replaced.
            OSError: a file cannot be written.
        """
        async with self._lock:
            with anyio.move_on_after(_SETTLE_TIMEOUT) as waiting:
                while running.server == server and running.commands.in_flight is not None:
                    self._changed = anyio.Event()
                    await self._changed.wait()
            if waiting.cancelled_caught:
                raise TransferRefusedError(f"round {number} cannot be recorded: its members are not known")
            if running.server != server:
                raise TransferRefusedError(f"term {term} is over: the parameter server was replaced")
            if number in self.rounds or (self._advance is not None and self._advance[:2] == (term, number)):
                _log.info("the outer update of round %d came twice", number)
                await self.result.discard(update)
                return
            self._advance = term, number, await self._with_room(lambda: self.result.advance(update, number))

    def wake(self) -> None:
        """Let a waiting `prepare` look again."""
        if self._changed is not None:
            self._changed.set()

    def record(self, number: int, term: int) -> RoundState | None:
        """Take the round whose weights are on disk into the record; None if it is there already."""
        if number in self.rounds or self._advance is None or self._advance[:2] != (term, number):
            return None
        state, self._advance = self._advance[2], None
        self.rounds[number] = CommittedRound(state.update, state.weights)
        return state

    async def commit(self, number: int) -> None:
        """Make the weights after a recorded round those of the job, waiting for room if there is none.

        Raises:
            OSError: a file cannot be moved or deleted.
        """
        await self._with_room(lambda: self.result.commit(number))

    async def finish(self) -> None:
        """Write the result, waiting for room if there is none.

        Raises:
            JobFailedError: a file is malformed.
            OSError: a file cannot be written.
        """
        await self._with_room(self.result.finish)

    async def _with_room(self, write: Callable[[], Awaitable[T]]) -> T:
        """Call `write` again until the disk has room for it."""
        began: float | None = None
        while True:
            try:
                result = await write()
            except OSError as error:
                if not lacks_room(error):
                    raise
                if began is None:
                    began = anyio.current_time()
                    self.context.notify(PAUSED, waits_for_room(self.result.directory, error))
                await anyio.sleep(ROOM_INTERVAL)
            else:
                if began is not None:
                    self.context.notify(CONTINUED, anyio.current_time() - began)
                return result

    def answer(self, question: AwaitCommit) -> CommitStatus | RetryAfter:
        """Answer a worker that has received an outer update."""
        number, found = question.round, self.rounds.get(question.round)
        if found is None:
            if number > self.last:
                return RetryAfter(_ASK_AGAIN)
            return CommitStatus(committed=False, reason=f"round {number} was committed before its digest was recorded")
        if found.update != question.update:
            why = f"round {number} was committed with another outer update, whose digest is {found.update}"
            return CommitStatus(committed=False, reason=why)
        return CommitStatus(committed=True, weights=found.weights)
