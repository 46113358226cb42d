"""What the bridge of a task that trains has besides: its data, its updates, its rounds and the outer updates.

Made by `executors.process` for a task with a `TrainConfig`; called by `backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

import anyio
import msgspec

from hypha_net import instrumentation, transfer
from hypha_net.errors import NoSpaceError
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import FetchedFile, RoundJoined, Transfer
from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, SchedulerReference, SliceAddress, TrainConfig
from hypha_proto.training_reports import (
    BatchDone,
    OuterStepTaken,
    ReportAnswer,
    RoundMetrics,
    SendingUpdate,
    TrainedBatch,
    TrainingReport,
    UpdateMerged,
)
from hypha_proto.transfer import PSEUDO_GRADIENT, PushHeader
from hypha_worker.bridge.current_server import CurrentServer
from hypha_worker.bridge.receive_queue import ReceiveQueue
from hypha_worker.bridge.round_commits import RoundClient, check_contribution
from hypha_worker.bridge.server_changes import ServerChanges
from hypha_worker.bridge.training_reports import TrainingReports
from hypha_worker.bridge.update_sender import UpdateSender
from hypha_worker.connectors.assigned_slices import AssignedSlices
from hypha_worker.connectors.peer_files import WantedFile
from hypha_worker.errors import bad_request, never_joins, not_allowed, round_closed, update_refused
from hypha_worker.tasks.execution import TaskContext
from hypha_worker.tasks.spec_references import named_peers, reference_peers

_SAMPLES: Final = instrumentation.Counter("hypha.worker.samples", "{sample}", "Samples in batches that were reported.")
_PREFETCHED: Final = instrumentation.Level(
    "hypha.worker.prefetch.depth", "{slice}", "Slices fetched and not begun, a job."
)
_REPORT_NAMES: Final[Mapping[type[TrainingReport], str]] = {
    RoundMetrics: "RoundMetrics",
    SendingUpdate: "Update",
    OuterStepTaken: "Updated",
    UpdateMerged: "UpdateReceived",
}
"""Values of the span attribute ``hypha.report``, which dashboards may filter on: independent of class names."""


class TrainingBridge:
    """The training of one attempt."""

    def __init__(
        self, context: TaskContext, config: TrainConfig, on_disk_error: Callable[[NoSpaceError | OSError], None]
    ) -> None:
        """Prepare; `run` asks for the commits of outer updates.

        Args:
            context: the attempt.
            config: its settings.
            on_disk_error: called when a file of a peer cannot be stored on this machine.
        """
        self.context = context
        """The attempt."""
        self._config = config
        self._files = context.fetcher.files
        self.server = CurrentServer(config)
        self._commits = RoundClient(context.attempt, context.contact)
        self.queue = ReceiveQueue(
            senders=reference_peers([config.results]),
            peers=named_peers(context.spec),
            storage=context.storage,
            commits=None if config.term is None else self._commits,
            term=config.term or 0,
            begins=None if self._joins else 0,
            on_disk_error=on_disk_error,
        )
        self.updates = UpdateSender(self._files, self.server, waits=self._joins)
        takes_batches = self.server.term is not None  # other strategies answer each batch
        self._reports = TrainingReports(context.attempt, context.contact, takes_batches=takes_batches)
        self.changes = ServerChanges(self)
        self._has_joined = False
        """Whether the executor has asked with which round it begins."""
        self._slices = AssignedSlices(context.attempt, self._files, context.contact)
        self._prefetched: dict[str, None] = {}
        """Fetched slices of which no batch was reported yet. A dict, because it is ordered."""
        self._next_numbers = {PSEUDO_GRADIENT: config.first_round or 1}
        """Round of the next file of each kind, for executors that name none."""
        self._recorded = (0, 0)
        """Round of the last batches that were reported several at once, and their number in it."""

    @property
    def _joins(self) -> bool:
        """Whether executors of the job join and leave its rounds."""
        return bool(self._config.join)

    @property
    def _about(self) -> instrumentation.Attributes:
        return {"hypha.job.id": str(self.context.attempt.job_id), "hypha.lease.id": str(self.context.lease)}

    async def run(self) -> None:
        """Ask for commits, and follow changes of the parameter server, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.queue.run)
            tasks.start_soon(self.changes.run)

    def close(self) -> None:
        """Accept no more files, close the newest update, and remove the attempt's gauge."""
        self.queue.close()
        self.updates.forget()
        _PREFETCHED.forget(self._about)

    # ------------------------------------------------------------------------------------------------------------ data

    async def fetch_slices(
        self, reference: SchedulerReference, folder: PurePosixPath, name: str | None, wanted: Transfer
    ) -> list[FetchedFile]:
        """Fetch the next slices that the scheduler assigns to the task.

        Args:
            reference: the job's data.
            folder: of the work directory.
            name: of the file of a single slice; None gives each slice one of its own.
            wanted: the request; with `ahead` the executor asks with which round it begins before it uses them.

        Raises:
            BridgeError: there is none, or it cannot be fetched.
        """
        if reference != self._config.data:
            raise not_allowed(f"dataset: {reference.dataset!r} is not the data of this job{self._data_text()}")
        dataset, parent, ahead = reference.dataset, self.context.traceparent, bool(wanted.ahead)
        with instrumentation.span("fetch slices", {"hypha.dataset": dataset}, parent=parent) as span:
            fetched = await self._slices.fetch(dataset, folder, name, wanted.count, ahead=ahead)
            indices = [file.metadata["slice"] for file in fetched]
            span.set_attributes({"hypha.slices": indices, "hypha.file.size": sum(file.size for file in fetched)})
        if self._joins and not self._has_joined and not ahead:  # it does not ask, and begins with `first_round`
            self.queue.join(self._config.first_round or 1)
        self._prefetched.update(dict.fromkeys(indices))
        _PREFETCHED.set(len(self._prefetched), self._about)
        return fetched

    def _data_text(self) -> str:
        """Return which dataset the task may fetch, for an error."""
        data = self._config.data
        if not isinstance(data, SchedulerReference):
            return ", which has none of a scheduler"
        return f": fetch {data.dataset!r} of scheduler {data.peer}"

    # --------------------------------------------------------------------------------------------------------- updates

    def kind_for(self, reference: PeersReference) -> str | None:
        """Return the kind of a file that goes only to peers which get the job's updates; None for other files."""
        updated = reference_peers([self._config.updates])
        return PSEUDO_GRADIENT if updated.issuperset(reference.peers) else None

    def round_of(self, wanted: Transfer, kind: str) -> int:
        """Return the round of a file that the executor sends; one that it does not name is the next."""
        return self._next_numbers.get(kind, 1) if wanted.round is None else wanted.round

    async def send(
        self, reference: PeersReference, file: FileIO, header: PushHeader, contribution: Contribution | None
    ) -> dict[PeerId, int]:
        """Send a file; return the bytes sent to each peer. An update is stated to the scheduler before."""
        if contribution is not None:
            if header.kind != PSEUDO_GRADIENT:
                raise bad_request("contribution: only a file for the peers of `updates` has one: leave it out")
            check_contribution(contribution, header.round, header.digest)
        if header.kind == PSEUDO_GRADIENT and self.server.term is not None:
            sent = await self._send_update(reference, file, header, contribution)
        else:
            with self._send_span(header):
                sent = await self._files.push(self.server.translate_reference(reference), file, header)
        self._next_numbers[header.kind] = header.round + 1
        return sent

    def _send_span(self, header: PushHeader) -> AbstractContextManager[instrumentation.Span]:
        about = {"hypha.round": header.round, "hypha.file.size": header.size}
        return instrumentation.span(f"send {header.kind}", about, parent=self.context.traceparent)

    async def _send_update(
        self, reference: PeersReference, file: FileIO, header: PushHeader, contribution: Contribution | None
    ) -> dict[PeerId, int]:
        async def state() -> None:
            await self._state_contribution(header, contribution)

        # kept before it is stated: the scheduler may replace the parameter server as soon as it knows of the update
        self.updates.keep(reference, file, msgspec.structs.replace(header, contribution=contribution))
        try:
            await state()
            with self._send_span(header):
                return await self.updates.send(state)
        except BaseException:
            self.updates.forget()
            raise

    async def _state_contribution(self, header: PushHeader, contribution: Contribution | None) -> None:
        """Tell the scheduler what an update was computed from.

        Raises:
            BridgeError: the update does not count.
        """
        number = header.round
        with instrumentation.span("state contribution", {"hypha.round": number}, parent=self.context.traceparent):
            answer = await self._commits.state_contribution(number, header.digest, header.samples, contribution)
        if answer.accepted:
            return
        why = f"the scheduler does not accept the update of round {number}: {answer.reason}"
        if not answer.rejoin or not self._has_joined:
            raise update_refused(why)
        self.queue.join(None)
        raise round_closed(f"{why}; ask /rounds/join with which round to begin")

    async def pull_outer_update(self, address: SliceAddress, target: Path, digest: str) -> transfer.PullResult:
        """Pull an outer update that the scheduler serves; `target` lies in the staging folder. Raises `BridgeError`."""
        pulled, _ = await self._files.pull([self.context.scheduler], WantedFile(address, digest), target)
        self.context.storage.traffic.received += pulled.size
        return pulled

    # ---------------------------------------------------------------------------------------------------------- rounds

    async def join_round(self) -> RoundJoined:
        """Wait until the scheduler says with which round the executor begins.

        What the executor has trained and not sent before is given up. Raises `BridgeError`.
        """
        if not self._joins:
            raise bad_request("join: this job's executors begin with `first_round`, or 1, and need not ask")
        self._has_joined = True
        self._recorded = (0, 0)
        self.updates.forget()
        self.queue.join(None)
        with instrumentation.span("join round", parent=self.context.traceparent):
            answer = await self._commits.join()
        if answer.round is None:
            raise never_joins(f"this executor takes part in no round: {answer.reason}")
        self.queue.join(answer.round)
        return RoundJoined(round=answer.round, weights=answer.weights, keeps=answer.keeps)

    async def report(self, progress: TrainingReport) -> ReportAnswer:
        """Report progress to the scheduler; return its answer. Raises `BridgeError`."""
        if isinstance(progress, BatchDone):
            self._record_batch(progress)
            with instrumentation.attached(None):  # a job has too many batches for its trace
                return await self._reports.report_batch(progress)
        about, parent = {"hypha.report": _REPORT_NAMES[type(progress)]}, self.context.traceparent
        with instrumentation.span("report", about, parent=parent):
            return await self._reports.report(progress)

    async def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        """Report several batches to the scheduler; return which it has counted. Raises `BridgeError`."""
        for batch in self._not_recorded(trained):
            self._record_batch(batch)
        with instrumentation.attached(None):
            return await self._reports.report_batches(trained)

    def _not_recorded(self, trained: TrainedBatches) -> tuple[TrainedBatch, ...]:
        """Return the batches that the executor reports for the first time."""
        number, before = self._recorded
        known = max(0, before - trained.first) if number == trained.round else 0
        self._recorded = (trained.round, max(trained.first + len(trained.batches), known + trained.first))
        return trained.batches[known:]

    def _record_batch(self, batch: TrainedBatch) -> None:
        _SAMPLES.add(batch.batch_size)
        for index in batch.slices or ():
            self._prefetched.pop(index, None)
        _PREFETCHED.set(len(self._prefetched), self._about)
