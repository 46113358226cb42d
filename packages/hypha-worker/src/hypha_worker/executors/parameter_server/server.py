"""Runs the parameter server of a job: receives pseudo-gradients, takes the outer step, pushes the outer update.

Training executors push to it through their bridges; the outer update goes
to their bridges and to the scheduler, which adds it to its own copy of the model.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from hypha_net import instrumentation, retries, transfer
from hypha_net.errors import NetError, NoSpaceError, TransferRefusedError
from hypha_net.transfer import FilePushTarget
from hypha_proto.commands import CommandAnswer, SetMembers, SetWorkers, TaskCommand
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference
from hypha_proto.round_membership import UPDATE_REFUSED, UpdateRefused
from hypha_proto.texts import quote
from hypha_proto.training_reports import REPORT, Done, OuterStepTaken, ReportError, ReportTraining
from hypha_proto.transfer import NO_JOB, NO_ROOM, OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_worker.connectors.peer_files import WantedFile
from hypha_worker.errors import BridgeError, ExecutionError, WorkReturnedError, disk_fault_of
from hypha_worker.executors.parameter_server import outer_push
from hypha_worker.executors.parameter_server.outer_push import OuterPush
from hypha_worker.executors.parameter_server.round_collector import (
    CompleteRound,
    EmptyRoundError,
    RoundCollector,
    UpdateRefusedError,
)
from hypha_worker.tasks.execution import Execution, TaskContext
from hypha_worker.tasks.spec_references import reference_peers

if TYPE_CHECKING:
    from hypha_proto.outer_step import TensorLayout
    from hypha_proto.safetensors_io import TensorInfo

_log = logging.getLogger(__name__)

_MAX_QUEUED_REFUSALS: Final = 64
ANNOUNCEMENT_WAIT: Final = 5.0
"""Seconds that the first update of a new worker may come before the scheduler's announcement of the worker."""
_MAX_UNANNOUNCED: Final = 16
"""Largest number of updates that wait for it."""
MAX_PUSHES: Final = 3
"""Largest number of outer updates of a job that are being pushed; with a further one, the oldest ends."""
_HEADER_ALLOWANCE: Final = 1 << 20
MAX_REFUSALS: Final = 3
"""Refusals of an outer update by the scheduler after which it is not pushed again, unless its disk is full."""
_CODECS: Final = ("fp32",)
_OTHER_LAYOUT: Final = "the update does not match the first one of this job"
_STEP_SECONDS: Final = instrumentation.Histogram("hypha.worker.outer_step.duration", "s", "Duration of outer steps.")


@dataclass(frozen=True, slots=True)
class _CheckedUpdate:
    """Layout and size of an update."""

    layout: TensorLayout
    size: int


class ParameterServer(Execution):
    """An execution in this process; outer steps are computed on files, in a thread."""

    def __init__(self, context: TaskContext) -> None:
        config = context.spec.aggregation
        if config is None:
            raise ExecutionError("aggregation is missing: a parameter server runs tasks that aggregate only")
        self._context = context
        self._config = config
        senders = set(reference_peers([config.updates]))
        self._collector = RoundCollector(senders)
        self._reference: _CheckedUpdate | None = None
        """The update of the first round that all others must match: `_choose_layout` has chosen it."""
        self._candidates: dict[Path, _CheckedUpdate] = {}
        """Updates that arrived before it was known, in this order."""
        self._momentum: Mapping[str, TensorInfo] | None = None
        """Tensors of the momentum that the job begins with."""
        self._has_begun = anyio.Event()
        """Set when the momentum is known, or the job is over."""
        self._files = context.fetcher.files
        self._changed = anyio.Event()
        self._count = 0
        self._pushes: list[OuterPush] = []
        """Outer updates that are being pushed, the oldest first."""
        self._announced = anyio.Event()
        """Set when workers or members are announced, then replaced."""
        self._unannounced = 0
        """Number of updates that wait for that."""
        self._stopped = anyio.CancelScope()
        self._disk_fault: str | None = None
        self._has_empty_round = False
        """Whether the last round ended without an update."""
        self._refusals: deque[UpdateRefused] = deque()
        self._refused = anyio.Event()
        self._is_over = False

    @property
    def senders(self) -> Set[PeerId]:
        """See `Execution.senders`."""
        return self._collector.senders

    @property
    def accepted_push_kind(self) -> str:
        """See `Execution.accepted_push_kind`."""
        return PSEUDO_GRADIENT

    def handle_command(self, command: TaskCommand) -> CommandAnswer:
        """See `Execution.handle_command`."""
        if command.workers is not None:
            self._set_workers(command.workers)
        elif command.members is not None:
            if (reason := self._set_members(command.members)) is not None:
                return CommandAnswer(number=command.number, accepted=False, reason=reason)
        else:
            return super().handle_command(command)
        return CommandAnswer(number=command.number, accepted=True)

    # ---------------------------------------------------------------------------------------------- receiving updates

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """See `Execution.accept_push`."""
        if self._is_over:
            return Refusal(reason=f"{NO_JOB} of job {self._context.attempt.job_id}: it is over")
        self._count += 1
        if header.term is not None and header.term != self._config.term:  # it may be sent again under this term
            reason = f"term: {header.term} is not {self._config.term}, the term of this parameter server"
            return Refusal(reason=reason)
        await self._wait_until_announced(peer)
        if self._collector.workers is not None and peer not in self._collector.senders:
            return Refusal(reason=f"{peer} is not a worker of this job")
        return self._accept_update(peer, header)

    async def _wait_until_announced(self, peer: PeerId) -> None:
        """Wait for the announcement of a new worker, which its first update may overtake."""
        if self._collector.workers is None or self._unannounced >= _MAX_UNANNOUNCED:
            return
        self._unannounced += 1
        try:
            with anyio.move_on_after(ANNOUNCEMENT_WAIT):
                while peer not in self._collector.senders:
                    await self._announced.wait()
        finally:
            self._unannounced -= 1

    def _accept_update(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        try:
            if self._collector.is_late(peer, header.round):
                return self._accept_late_update(peer, header)
            self._admit(peer, header)
        except UpdateRefusedError as error:
            self._report_refusal(peer, header.round, str(error))
            return Refusal(reason=str(error))
        path = self._context.work_dir / f"update-{header.round}-{self._count}.safetensors"

        async def on_complete(size: int, digest: str) -> None:
            await self._on_update_received(peer, header.round, path, size, digest)

        return self._target(path, on_complete)

    def _target(self, path: Path, on_complete: Callable[[int, str], Awaitable[None]]) -> FilePushTarget:
        slot, quota = str(self._context.work_dir), self._context.storage
        return FilePushTarget(
            path, self._max_size(), on_complete, slot=slot, quota=quota, on_disk_error=self._stop_for_disk_error
        )

    def _stop_for_disk_error(self, error: NoSpaceError | OSError) -> None:
        if (reason := disk_fault_of(error, self._context.work_dir)) is not None:
            self._disk_fault = self._disk_fault or reason
            self._stopped.cancel()

    def _accept_late_update(self, peer: PeerId, header: PushHeader) -> FilePushTarget:
        path = self._context.work_dir / f"late-{self._count}.safetensors"

        async def on_complete(_size: int, _digest: str) -> None:
            self._drop_late(peer, header.round, path)

        return self._target(path, on_complete)

    def _drop_late(self, peer: PeerId, number: int, path: Path) -> None:
        _log.warning("the update of %s for round %d arrived late and does not count", peer, number)
        _remove(path)

    def _max_size(self) -> int:
        """Return the largest accepted update: slightly more than the first one."""
        if self._reference is None:
            return sys.maxsize
        return self._reference.size + self._reference.size // 50 + _HEADER_ALLOWANCE

    def _admit(self, peer: PeerId, header: PushHeader) -> None:
        if header.kind != PSEUDO_GRADIENT:
            raise UpdateRefusedError(f"{quote(header.kind)} is not accepted here, only {PSEUDO_GRADIENT}")
        if header.codec not in _CODECS:
            raise UpdateRefusedError(f"codec {quote(header.codec)} is not supported here, only {', '.join(_CODECS)}")
        self._collector.admit(peer, header.round, header.digest)

    async def _on_update_received(self, peer: PeerId, number: int, path: Path, size: int, digest: str) -> None:
        try:
            norm = await self._inspect(path, size)
            if self._collector.is_late(peer, number):  # the round continued without it during the transfer
                self._drop_late(peer, number, path)
                return
            replaced = self._collector.add(peer, number, path, digest, norm)
        except (TensorFileError, UpdateRefusedError, OSError) as error:
            _remove(path)
            self._report_refusal(peer, number, str(error))
            raise TransferRefusedError(str(error)) from error
        if replaced is not None:
            _remove(replaced)
        self._changed.set()

    async def _inspect(self, path: Path, size: int) -> float:
        """Check the contents of an update; return its norm.

        Raises:
            TensorFileError: it is malformed.
            UpdateRefusedError: it does not match the others.
            OSError: it cannot be read.
        """
        from hypha_proto.outer_step import inspect_update

        await self._has_begun.wait()
        inspected = await self._context.storage.run(inspect_update, path, abandon=True)
        layout = inspected.layout
        if self._momentum is not None and (difference := layout.momentum_difference(self._momentum)):
            raise UpdateRefusedError(f"the update does not match the momentum of this job: {difference}")
        if self._reference is None:  # a single sender does not decide what the model is
            self._candidates[path] = _CheckedUpdate(layout, size)
        elif difference := self._reference.layout.difference(layout):
            raise UpdateRefusedError(f"{_OTHER_LAYOUT}: {difference}")
        return inspected.norm

    def _refuse(self, peer: PeerId, number: int, reason: str) -> None:
        """Let nothing of a peer count in a round any more."""
        _log.warning("update from %s for round %d refused: %s", peer, number, reason)
        if (dropped := self._collector.refuse(peer, number)) is not None:
            self._candidates.pop(dropped, None)
            _remove(dropped)

    def _report_refusal(self, peer: PeerId, number: int, reason: str) -> None:
        self._refuse(peer, number, reason)
        message = self._refusal(peer, number, reason)
        if self._is_over or len(self._refusals) == _MAX_QUEUED_REFUSALS:
            _log.warning("a refusal is not reported to the scheduler: too many are queued, or the job is over")
            return
        self._refusals.append(message)
        self._refused.set()

    def _refusal(self, peer: PeerId, number: int, reason: str, *, missing: bool = False) -> UpdateRefused:
        return UpdateRefused(self._context.attempt, number, peer, reason, missing)

    def _set_members(self, message: SetMembers) -> str | None:
        """Set the members of a round; return why that cannot be, None if it is done."""
        reason, dropped = self._collector.set_members(message, anyio.current_time())
        for path in dropped:
            _remove(path)
        if reason is None:
            for update in self._collector.drop_mismatched(message.round):
                _remove(update.path)
                self._report_refusal(update.peer, message.round, update.reason)
            self._changed.set()
            self._notify_announced()
        else:
            settled = self._collector.round is not None and message.round < self._collector.round
            level = logging.INFO if settled else logging.WARNING  # they cross the step of a round that loses a member
            _log.log(level, "members of round %d refused: %s", message.round, reason)
        return reason

    def _set_workers(self, message: SetWorkers) -> None:
        before = self._collector.workers or reference_peers([self._config.results])
        self._collector.set_workers(message.workers)
        gone = before - set(message.workers) - {self._context.scheduler}
        for push in self._pushes:
            push.stop(gone)
        self._notify_announced()

    def _notify_announced(self) -> None:
        self._announced.set()
        self._announced = anyio.Event()

    # -------------------------------------------------------------------------------------------------------- stepping

    async def run(self) -> None:
        """See `Execution.run`."""
        self._context.control.report_ready()
        with self._stopped:
            await self._run()
        if self._disk_fault is not None:
            raise WorkReturnedError(self._disk_fault)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_refusals)
            try:
                await self._fetch_momentum()
                while not await self._run_round(tasks):
                    pass
            except (TensorFileError, EmptyRoundError, OSError, NetError) as error:
                reason = disk_fault_of(error, self._context.work_dir)
                raise (ExecutionError(str(error)) if reason is None else WorkReturnedError(reason)) from error
            finally:
                self._is_over = True
                self._has_begun.set()
                self._refused.set()
                tasks.cancel_scope.deadline = anyio.current_time() + 1.0

    async def _fetch_momentum(self) -> None:
        """Fetch the momentum that the job begins with, if there is one.

        Raises:
            ExecutionError: it cannot be fetched, or is no momentum.
        """
        from hypha_proto.outer_step import inspect_momentum

        reference, storage = self._config.momentum, self._context.storage
        if reference is not None:
            if not isinstance(reference, PeersReference) or reference.resource is None:
                raise ExecutionError("momentum: the reference names no file of a peer")
            path = self._momentum_path
            try:
                await self._files.pull(reference.peers, WantedFile(reference.resource), path)
                self._momentum = await storage.run(inspect_momentum, path, abandon=True)
            except (BridgeError, TensorFileError) as error:
                raise ExecutionError(f"momentum: {error}") from error
            _log.info("the outer momentum of %d tensors comes from the scheduler", len(self._momentum))
        self._has_begun.set()

    @property
    def _momentum_path(self) -> Path:
        folder = self._context.work_dir / "outer"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / "momentum.safetensors"

    async def _run_round(self, tasks: anyio.abc.TaskGroup) -> bool:
        """Run one round; return whether it was the last."""
        await self._wait_for_updates()
        while await self._refuse_outliers():
            await self._wait_for_updates()
        if self._collector.is_empty and not self._has_empty_round:
            self._has_empty_round = True  # all of its members may be gone; the scheduler announces others
            await self._report_missing(self._collector.round or 0, self._collector.drop_members())
            return False
        done = self._collector.close_round()
        self._has_empty_round = False
        await self._report_missing(done.round, done.missing)
        done = await self._leave_out_other_layouts(done)
        result = await self._step(done)
        push = await self._push_outer_update(done, result, tasks)
        is_last = await self._report_step(done)
        if is_last:
            await push.wait(self._recorder, outer_push.LAST_PATIENCE)
        return is_last

    async def _report_missing(self, number: int, missing: Iterable[PeerId]) -> None:
        """Report missing members, before the step: until then the scheduler counts their samples."""
        for peer in missing:
            _log.warning("round %d continues without the update of %s, which did not arrive in time", number, peer)
            await self._send_to_scheduler(self._refusal(peer, number, "it did not arrive in time", missing=True))

    async def _refuse_outliers(self) -> bool:
        """Refuse updates that are too large, and tell the scheduler, which announces the round without them."""
        number, outliers = self._collector.round or 0, self._collector.find_outliers()
        for peer, reason in outliers.items():
            self._refuse(peer, number, reason)
        for peer, reason in outliers.items():
            await self._send_to_scheduler(self._refusal(peer, number, reason))
        return bool(outliers)

    async def _leave_out_other_layouts(self, done: CompleteRound) -> CompleteRound:
        """Refuse the updates of the first round whose tensors are not those of most samples."""
        reference = self._reference
        if reference is None:
            reference = self._reference = _choose_layout(
                [(self._candidates[path], weight) for _, path, weight in done.updates]
            )
        kept = []
        for peer, path, weight in done.updates:
            candidate = self._candidates.pop(path, None)
            if candidate is not None and (difference := reference.layout.difference(candidate.layout)):
                _remove(path)
                _log.warning("update from %s for round %d refused: %s", peer, done.round, difference)
                await self._send_to_scheduler(self._refusal(peer, done.round, f"{_OTHER_LAYOUT}: {difference}"))
            else:
                kept.append((peer, path, weight))
        if not kept:
            raise EmptyRoundError(f"no update of round {done.round} matches the first one of this job")
        return replace(done, updates=tuple(kept))

    async def _wait_for_updates(self) -> None:
        while (due := self._collector.seconds_until_due(anyio.current_time())) != 0.0:
            self._changed = anyio.Event()
            with anyio.move_on_after(due):
                await self._changed.wait()

    async def _step(self, done: CompleteRound) -> Path:
        about = {"hypha.round": done.round, "hypha.updates": len(done.updates)}
        with instrumentation.span("outer step", about):
            return await self._compute_step(done)

    async def _compute_step(self, done: CompleteRound) -> Path:
        from hypha_proto.outer_step import outer_step
        from hypha_proto.update_file import UpdateMetadata

        started = anyio.current_time()
        storage, momentum = self._context.storage, self._momentum_path
        folder, reference = momentum.parent, self._reference
        assert reference is not None
        layout = reference.layout
        await storage.run(storage.reserve, folder, 3 * layout.float32_size(reference.size))
        result = folder / f"outer-{done.round}.safetensors"
        await storage.run(
            outer_step,
            [(path, weight) for _, path, weight in done.updates],
            momentum,
            result,
            self._config.optimizer,
            UpdateMetadata(round=done.round, statistics=layout.statistics, aliases=layout.aliases),
            abandon=True,  # when the job is cancelled, its thread may finish on files that are deleted
        )
        await storage.run(storage.release, folder)
        for _, path, _ in done.updates:
            _remove(path)
        took = anyio.current_time() - started
        _STEP_SECONDS.record(took)
        _log.info("round %d: outer step over %d updates in %.3f s", done.round, len(done.updates), took)
        return result

    async def _push_outer_update(self, done: CompleteRound, result: Path, tasks: anyio.abc.TaskGroup) -> OuterPush:
        """Push the outer update to all receivers concurrently; wait for those that take part in the round.

        Only the scheduler must have it: the members may be gone, and are not waited for long.
        """
        size, digest = await transfer.describe(result)
        header = PushHeader(
            attempt=self._context.attempt,
            round=done.round,
            kind=OUTER_UPDATE,
            name=result.name,
            size=size,
            digest=digest,
            scheduler=self._context.scheduler,
            term=self._config.term,
            samples=int(sum(weight for _, _, weight in done.updates)),
        )
        participants, others = self._receivers(done)
        push = OuterPush(result, header, participants, others, repeats=self._recorder is not None)
        tasks.start_soon(self._run_push, push)
        await push.wait(self._recorder, outer_push.PATIENCE)
        if self._recorder is None and push.reached.isdisjoint(participants):
            raise ExecutionError(f"the outer update of round {done.round} reached none of {len(participants)} peers")
        return push

    @property
    def _recorder(self) -> PeerId | None:
        """The scheduler, if it receives outer updates: the job goes on when it alone has one."""
        scheduler = self._context.scheduler
        return scheduler if scheduler in reference_peers([self._config.results]) else None

    async def _run_push(self, push: OuterPush) -> None:
        self._pushes.append(push)
        if len(self._pushes) > MAX_PUSHES:
            self._pushes[0].stop()
        try:
            await push.run(self._push_to)
        finally:
            self._pushes.remove(push)

    async def _push_to(self, peer: PeerId, path: Path, header: PushHeader) -> int:
        """Push an outer update to a receiver, with retries; return the bytes sent. Raises `NetError`."""
        if peer == self._context.scheduler:
            return await self._push_to_scheduler(path, header)
        return await self._files.push_to(peer, path, header)

    async def _push_to_scheduler(self, path: Path, header: PushHeader) -> int:
        """Push an outer update to the scheduler; return the bytes sent.

        The job cannot go on without it, so the push is repeated, also while the scheduler's disk is full. After other
        refusals, as when the scheduler has the update already, its answer to the report of the step decides.

        Raises:
            NetError: it was refused `MAX_REFUSALS` times for other reasons.
        """
        scheduler, failures, refusals = self._context.scheduler, 0, 0
        while True:
            try:
                return await self._files.push_to(scheduler, path, header)
            except NetError as error:
                is_refused = isinstance(error, TransferRefusedError) and not error.reason.startswith(NO_ROOM)
                refusals += is_refused and self._context.contact.is_settled
                if refusals == MAX_REFUSALS:
                    raise
                _log.warning("outer update of round %d did not reach the scheduler: %s", header.round, error)
            await retries.UPDATE.wait(failures)
            failures += 1

    def _receivers(self, done: CompleteRound) -> tuple[list[PeerId], list[PeerId]]:
        """Return the receivers of the outer update: the scheduler and members whose updates count; then all others."""
        listed, scheduler = reference_peers([self._config.results]), self._context.scheduler
        workers = self._collector.workers
        if workers is not None:
            listed = workers | (listed & {scheduler})
        members = [peer for peer, _, _ in done.updates if workers is None or peer in workers]
        participants = dict.fromkeys([*members, *(listed & {scheduler})])
        return list(participants), sorted(listed - participants.keys())

    async def _report_step(self, done: CompleteRound) -> bool:
        """Report an outer step to the scheduler; return whether it was the last."""
        context = self._context
        request = ReportTraining(context.attempt, OuterStepTaken(), id=uuid.uuid4())
        answer = await context.contact.call(REPORT, request, is_refusal=lambda answer: isinstance(answer, ReportError))
        if isinstance(answer, ReportError):
            why = f": {answer.reason}" if answer.reason else "; its log says why"
            raise ExecutionError(f"the scheduler does not accept the outer step of round {done.round}{why}")
        return isinstance(answer, Done)

    async def _send_refusals(self) -> None:
        while self._refusals or not self._is_over:
            if self._refusals:
                await self._send_to_scheduler(self._refusals.popleft())
            else:
                self._refused = anyio.Event()
                await self._refused.wait()

    async def _send_to_scheduler(self, message: UpdateRefused) -> None:
        try:
            # one that does not know the job yet acknowledges it, too
            await self._context.contact.call(
                UPDATE_REFUSED, message, is_refusal=lambda _answer: True, timeout=10.0, policy=retries.REQUEST
            )
        except NetError as error:
            _log.warning("an update that does not count could not be reported to the scheduler: %s", error)


def _choose_layout(candidates: Sequence[tuple[_CheckedUpdate, float]]) -> _CheckedUpdate:
    """Return the layout of the updates with the largest weight together; the first of equal ones."""
    groups: list[tuple[_CheckedUpdate, float]] = []
    for candidate, weight in candidates:
        for number, (known, total) in enumerate(groups):
            if known.layout == candidate.layout:
                groups[number] = known, total + weight
                break
        else:
            groups.append((candidate, weight))
    chosen, _ = max(groups, key=lambda group: group[1])
    return chosen


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
