"""Runs the parameter server of a job: receives pseudo-gradients, takes the outer step, pushes the outer update.

Called by `jobs.job_manager` as an execution. Training executors push to it through their bridges; the outer update goes
to their bridges and to the scheduler, which adds it to its own copy of the model.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from hypha_net import instrumentation, transfer
from hypha_net.errors import NetError, TransferRefusedError
from hypha_net.transfer import FilePushTarget
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import AggregateJob
from hypha_proto.progress import REPORT, Done, OuterStepTaken, ProgressError, ProgressRequest
from hypha_proto.round_membership import ROUND_MEMBERS, UPDATE_REFUSED, MembersKnown, RoundMembers, UpdateRefused
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.connectors.peer_protocols import speaks_lease_protocol
from hypha_worker.connectors.rpc_retry import REPORT_DELAYS, call_with_retries
from hypha_worker.errors import ExecutionError
from hypha_worker.executors.parameter_server.round_collector import (
    CompleteRound,
    EmptyRoundError,
    RoundCollector,
    UpdateRefusedError,
)
from hypha_worker.jobs.execution import ExecutionTrace, JobContext, MessageHandler
from hypha_worker.jobs.references import reference_peers

if TYPE_CHECKING:
    from hypha_worker.executors.parameter_server.outer_step import TensorLayout

_log = logging.getLogger(__name__)

_MAX_QUEUED_REFUSALS: Final = 64
_HEADER_ALLOWANCE: Final = 1 << 20
_CODECS: Final = ("fp32",)
_STEP_SECONDS: Final = instrumentation.Histogram("hypha.worker.outer_step.duration", "s", "Duration of outer steps.")


@dataclass(slots=True)
class _ReferenceLayout:
    """The layout and size of the first update, which all others must match."""

    first: object | None = None
    size: int = 0


class ParameterServer:
    """An `Execution` in this process; outer steps are computed on files, in a thread."""

    def __init__(self, context: JobContext) -> None:
        if not isinstance(context.spec.executor, AggregateJob):
            raise ExecutionError("a parameter server runs jobs of class aggregate only")
        config = context.spec.executor.config
        self._context = context
        self._config = config
        self._collector = RoundCollector(set(reference_peers([config.updates])), members_announced=bool(config.members))
        self._reference = _ReferenceLayout()
        self._files = PeerFiles(context.endpoint, context.storage, context.traffic)
        self._changed = anyio.Event()
        self._count = 0
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

    @property
    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """See `Execution.message_handlers`."""
        return {ROUND_MEMBERS.name: self._set_round_members}

    @property
    def trace(self) -> ExecutionTrace:
        """See `Execution.trace`."""
        return ExecutionTrace()

    # ---------------------------------------------------------------------------------------------- receiving updates

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """See `Execution.accept_push`."""
        self._count += 1
        if header is not None and self._collector.is_late(peer, header.round):
            return self._accept_late_update(peer, header)
        try:
            number = self._admit(peer, header)
        except UpdateRefusedError as error:
            self._report_refusal(peer, header.round if header else self._collector.round or 0, str(error))
            return Refusal(reason=str(error))
        path = self._context.work_dir / f"update-{number}-{self._count}.safetensors"

        async def on_complete(size: int, _digest: str) -> None:
            await self._on_update_received(peer, number, path, size)

        return self._target(path, on_complete)

    def _target(self, path: Path, on_complete: Callable[[int, str], Awaitable[None]]) -> FilePushTarget:
        slot, quota = str(self._context.work_dir), self._context.storage
        return FilePushTarget(path, self._max_size(), on_complete, slot=slot, quota=quota)

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
        known = self._reference.size
        return known + known // 50 + _HEADER_ALLOWANCE if known else sys.maxsize

    def _admit(self, peer: PeerId, header: PushHeader | None) -> int:
        if header is not None and header.kind != PSEUDO_GRADIENT:
            raise UpdateRefusedError(f"{header.kind[:40]!r} is not accepted here, only {PSEUDO_GRADIENT}")
        if header is not None and header.codec not in _CODECS:
            raise UpdateRefusedError(f"codec {header.codec[:40]!r} is not supported here, only {', '.join(_CODECS)}")
        return self._collector.admit(peer, header.round if header is not None else None)

    async def _on_update_received(self, peer: PeerId, number: int, path: Path, size: int) -> None:
        try:
            await self._check_layout(path, size)
            if self._collector.is_late(peer, number):  # the round continued without it during the transfer
                self._drop_late(peer, number, path)
                return
            replaced = self._collector.add(peer, number, path)
        except (TensorFileError, UpdateRefusedError, OSError) as error:
            _remove(path)
            self._report_refusal(peer, number, str(error))
            raise TransferRefusedError(str(error)) from error
        if replaced is not None:
            _remove(replaced)
        self._changed.set()

    async def _check_layout(self, path: Path, size: int) -> None:
        from hypha_worker.executors.parameter_server.outer_step import TensorLayout, inspect_update

        layout = await self._context.storage.run(inspect_update, path, abandon=True)
        first = self._reference.first
        if not isinstance(first, TensorLayout):
            self._reference = _ReferenceLayout(layout, size)
        elif difference := first.difference(layout):
            raise UpdateRefusedError(f"the update does not match the first one of this job: {difference}")

    def _report_refusal(self, peer: PeerId, number: int, reason: str) -> None:
        _log.warning("update from %s for round %d refused: %s", peer, number, reason)
        message = UpdateRefused(job_id=self._context.spec.job_id, round=number, peer=peer, reason=reason[:1000])
        if self._is_over or len(self._refusals) == _MAX_QUEUED_REFUSALS:
            _log.warning("a refusal is not reported to the scheduler: too many are queued, or the job is over")
            return
        self._refusals.append(message)
        self._refused.set()

    async def _set_round_members(self, _scheduler: PeerId, message: RoundMembers) -> MembersKnown:
        answer, dropped = self._collector.set_round_members(message, anyio.current_time())
        for path in dropped:
            _remove(path)
        if answer.accepted:
            self._changed.set()
        else:
            _log.warning("members of round %d refused: %s", message.round, answer.reason)
        return answer

    # -------------------------------------------------------------------------------------------------------- stepping

    async def run(self) -> None:
        """See `Execution.run`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_refusals)
            try:
                while not await self._run_round(tasks):
                    pass
            except (TensorFileError, EmptyRoundError, OSError, NetError) as error:
                raise ExecutionError(str(error)) from error
            finally:
                self._is_over = True
                self._refused.set()
                tasks.cancel_scope.deadline = anyio.current_time() + 1.0

    async def _run_round(self, tasks: anyio.abc.TaskGroup) -> bool:
        """Run one round; return whether it was the last."""
        await self._wait_for_updates()
        done = self._collector.close_round()
        await self._report_missing(done)
        result = await self._step(done)
        if self._reports_before_pushing():
            is_last = await self._report_step(done)
            await self._push_outer_update(done, result, tasks)
        else:
            await self._push_outer_update(done, result, tasks)
            is_last = await self._report_step(done)
        return is_last

    def _reports_before_pushing(self) -> bool:
        """Return whether the scheduler is one of the older network.

        It tells a worker that has merged an update of which it has not heard yet to continue, for ever in the last
        round. Ours hears of the step when the members have the update.
        """
        if self._config.members:  # only ours announce the members of a round
            return False
        return not speaks_lease_protocol(self._context.endpoint, self._context.scheduler)

    async def _report_missing(self, done: CompleteRound) -> None:
        """Report missing members, before the step: until then the scheduler counts their samples."""
        for peer in done.missing:
            _log.warning("round %d continues without the update of %s, which did not arrive in time", done.round, peer)
            message = UpdateRefused(
                job_id=self._context.spec.job_id, round=done.round, peer=peer, reason="it did not arrive in time"
            )
            await self._send_to_scheduler(message)

    async def _wait_for_updates(self) -> None:
        while (due := self._collector.seconds_until_due(anyio.current_time())) != 0.0:
            self._changed = anyio.Event()
            with anyio.move_on_after(due):
                await self._changed.wait()

    async def _step(self, done: CompleteRound) -> Path:
        from hypha_worker.executors.parameter_server.outer_step import TensorLayout

        layout = self._reference.first
        if not isinstance(layout, TensorLayout):
            raise ExecutionError("an outer step is due and no update was checked")
        about = {"hypha.round": done.round, "hypha.updates": len(done.updates)}
        with instrumentation.span("outer step", about):
            return await self._compute_step(done, layout)

    async def _compute_step(self, done: CompleteRound, layout: TensorLayout) -> Path:
        from hypha_proto.update_file import UpdateMetadata
        from hypha_worker.executors.parameter_server.outer_step import OuterOptimizer, outer_step

        settings, started = self._config.optimizer, anyio.current_time()
        storage, folder = self._context.storage, self._context.work_dir / "outer"
        folder.mkdir(mode=0o700, exist_ok=True)
        await storage.run(storage.reserve, folder, 3 * layout.float32_size(self._reference.size))
        result = folder / f"outer-{done.round}.safetensors"
        await storage.run(
            outer_step,
            [(path, weight) for _, path, weight in done.updates],
            folder / "momentum.safetensors",
            result,
            OuterOptimizer(settings.learning_rate, settings.momentum, settings.nesterov is not False),
            UpdateMetadata(round=done.round, statistics=layout.statistics),
            abandon=True,  # when the job is cancelled, its thread may finish on files that are deleted
        )
        await storage.run(storage.release, folder)
        for _, path, _ in done.updates:
            _remove(path)
        took = anyio.current_time() - started
        _STEP_SECONDS.record(took)
        _log.info("round %d: outer step over %d updates in %.3f s", done.round, len(done.updates), took)
        return result

    async def _push_outer_update(self, done: CompleteRound, result: Path, tasks: anyio.abc.TaskGroup) -> None:
        """Push the outer update to all receivers concurrently; wait only for those that take part in the round."""
        size, digest = await transfer.describe(result)
        header = PushHeader(
            job_id=self._context.spec.job_id,
            round=done.round,
            kind=OUTER_UPDATE,
            name=result.name,
            size=size,
            digest=digest,
            lease=self._context.lease,
            scheduler=self._context.scheduler,
        )
        participants, others = self._receivers(done)
        if others:
            copy = result.with_name(f"{result.name}.others")
            os.link(result, copy)
            tasks.start_soon(self._push_and_remove, others, copy, header)
        if not await self._push_and_remove(participants, result, header):
            raise ExecutionError(f"the outer update of round {done.round} reached none of {len(participants)} peers")

    async def _push_and_remove(self, peers: Sequence[PeerId], path: Path, header: PushHeader) -> bool:
        with instrumentation.span("send outer update", {"hypha.round": header.round, "hypha.peers": len(peers)}):
            sent, failed = await self._files.push_each(peers, path, header)
        for peer, error in failed.items():
            _log.warning("outer update of round %d did not reach %s: %s", header.round, peer, error)
        _remove(path)
        return bool(sent)

    def _receivers(self, done: CompleteRound) -> tuple[list[PeerId], list[PeerId]]:
        """Return the receivers of the outer update: the scheduler and members whose updates count; then all others."""
        listed = sorted(reference_peers([self._config.results]))
        members = [peer for peer, _, _ in done.updates]
        scheduler = [peer for peer in listed if peer == self._context.scheduler]
        participants = list(dict.fromkeys([*members, *scheduler]))
        return participants, [peer for peer in listed if peer not in participants]

    async def _report_step(self, done: CompleteRound) -> bool:
        """Report an outer step to the scheduler; return whether it was the last."""
        context = self._context
        request = ProgressRequest(
            job_id=context.spec.job_id, progress=OuterStepTaken(), lease=context.lease, id=uuid.uuid4()
        )
        answer = await call_with_retries(
            context.endpoint, context.scheduler, REPORT, request, timeout=30.0, delays=REPORT_DELAYS
        )
        if isinstance(answer, ProgressError):
            why = f": {answer.reason[:400]}" if answer.reason else "; its log says why"
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
            await call_with_retries(self._context.endpoint, self._context.scheduler, UPDATE_REFUSED, message)
        except NetError as error:
            _log.warning("an update that does not count could not be reported to the scheduler: %s", error)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
