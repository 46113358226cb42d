"""The worker's side of the bridge of one task: fetch, send, receive and report.

It is confined to one attempt: its work directory, what its definition names, and its scheduler. What only a task that
trains has is in `training`. An executor needs neither OpenTelemetry nor a synchronised clock: it reports spans after
they ended, each with how long ago it began, and they are recorded in the trace of its job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import PurePosixPath
from typing import Final

import anyio
import msgspec

from hypha_net import instrumentation, transfer
from hypha_proto.bridge_api import (
    ExecutorSpan,
    FetchedFile,
    ProgressUpdate,
    ProgressUpdateAnswer,
    ReceivedFile,
    ResourceReference,
    SpanReport,
    Transfer,
)
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, SchedulerReference
from hypha_proto.tasks import StoredFile, TaskProgress
from hypha_proto.transfer import OTHER_FILE, TASK_RESULT, PushHeader
from hypha_worker.bridge.training import TrainingBridge
from hypha_worker.connectors.assigned_slices import AssignedSlices
from hypha_worker.connectors.peer_files import fetched_file
from hypha_worker.errors import (
    BridgeError,
    DiskFaultError,
    ExecutionError,
    StorageExceededError,
    bad_request,
    disk_fault_of,
    not_allowed,
    not_found,
    storage_exceeded,
)
from hypha_worker.task_files import TaskFiles
from hypha_worker.tasks.execution import TaskContext
from hypha_worker.tasks.output_files import copy_file, describe_file, describe_files, list_files
from hypha_worker.tasks.spec_references import check_peers, named_peers, with_secrets

ARTIFACTS: Final = "artifacts"
"""Folder of what is fetched by a bare reference."""
FIRST_SLICE: Final = "0"
"""Name there of a slice, in place of the one before."""
SLICES: Final = "slices"
"""Folder of slices of a resource for which the executor names none."""
RECEIVED: Final = "received"
"""Folder of received files for which the executor names none."""
_NO_FILES: Final = "a task has no files of peers to receive: its resources are there, see /resources/fetch"
_SLICE_TIMEOUT: Final = 45.0
"""Seconds that one question for a slice may take: a scheduler answers within 30 s whether one has become free."""


class Sent(msgspec.Struct, frozen=True):
    """The answer of ``/resources/send``."""

    sent: dict[str, int]
    """Bytes sent, by peer id."""
    round: int
    size: int
    checksum: str


class OutputFile(msgspec.Struct, frozen=True):
    """A file of a stored output."""

    path: str
    """Relative to the output; empty where it is a single file."""
    size: int
    checksum: str


class SentOutput(msgspec.Struct, frozen=True):
    """The answer of ``/resources/send`` for an output of a task."""

    output: str
    size: int
    """Bytes of all its files."""
    files: list[OutputFile]


class BridgeBackend:
    """The worker's side, as `routes` calls it. Every method may raise `BridgeError`."""

    def __init__(
        self, context: TaskContext, training: TrainingBridge | None, on_disk_fault: Callable[[str], None]
    ) -> None:
        """Prepare.

        Args:
            context: the attempt.
            training: what it has besides if it trains.
            on_disk_fault: called with the reason when this worker's disk is full or fails.
        """
        self.context = context
        self._training = training
        self._on_disk_fault = on_disk_fault
        self._spans = SpanRecorder()

    @property
    def _files(self) -> TaskFiles:
        return self.context.storage.files

    def training(self, remedy: str) -> TrainingBridge:
        """Return what a task that trains has besides; one that does not is told the remedy."""
        if self._training is None:
            raise bad_request(remedy)
        return self._training

    # ------------------------------------------------------------------------------------------------------ references

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """Fetch what a reference names into the work directory."""
        reference = wanted.reference
        if (wanted.count is not None or wanted.ahead) and not isinstance(reference, SchedulerReference):
            key, how = ("ahead", "ahead") if wanted.count is None else ("count", "several at a time")
            raise bad_request(f"{key}: only slices of a scheduler's dataset are fetched {how}: leave it out")
        if self._training is None and isinstance(reference, SchedulerReference):
            raise not_allowed("a task has no data of its scheduler: name a dataset among its resources")
        if not isinstance(reference, ResourceReference):
            check_peers(self.context.spec, reference)
        elif (place := self.context.resources.get(reference.name)) is not None:
            with self._translating_errors():
                return await self.context.storage.run(self._take_resource, reference.name, place, wanted.path)
        with self._translating_errors():
            async with self.context.storage.transfers:
                fetched = await self._fetch(wanted)
        self.context.storage.traffic.received += sum(file.size for file in fetched)
        return fetched

    async def _fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        reference, path = wanted.reference, wanted.path
        if isinstance(reference, ResourceReference):
            return await self._fetch_slice(reference.name, path)
        slice_name = None if path or wanted.count else FIRST_SLICE
        folder = self._files.make_folder(path or ARTIFACTS)
        if isinstance(reference, SchedulerReference) and self._training is not None:
            return await self._training.fetch_slices(reference, folder, slice_name, wanted)
        about = {"hypha.reference": type(reference).__name__}
        with instrumentation.span("fetch", about, parent=self.context.traceparent):
            return await self.context.fetcher.fetch(with_secrets(self.context.spec, reference), folder, slice_name)

    async def send(self, wanted: Transfer) -> Sent | SentOutput:
        """Push a file of the work directory to the peers of a reference, or store an output of the task."""
        if isinstance(wanted.reference, ResourceReference):
            return await self._store_output(wanted.reference.name, wanted.path)
        reference = self._peers_reference(wanted, "a file is sent to peers")
        if not reference.peers:
            raise bad_request("peers: [] names no receiver: name one or more of the peers of this job's references")
        is_result = self.context.spec.sends is True and set(reference.peers) == {self.context.scheduler}
        if not is_result:
            check_peers(self.context.spec, reference)
        with self._translating_errors(), self._files.open_file(wanted.path) as file:
            return await self._send(reference, wanted, file, TASK_RESULT if is_result else OTHER_FILE)

    async def _send(self, reference: PeersReference, wanted: Transfer, file: FileIO, kind: str) -> Sent:
        """Send an open file: what takes its place from now on is not sent."""
        training, context = self._training, self.context
        if training is not None:
            kind = training.kind_for(reference) or kind
        number = (wanted.round or 0) if training is None else training.round_of(wanted, kind)
        size, digest = await transfer.describe(file)
        header = PushHeader(
            attempt=context.attempt,
            round=number,
            kind=kind,
            name=PurePosixPath(wanted.path).name,
            size=size,
            digest=digest,
            samples=wanted.samples or 0,
            scheduler=context.scheduler,
        )
        if training is None:
            sent = await context.fetcher.files.push(reference, file, header)
        else:
            sent = await training.send(reference, file, header, wanted.contribution)
        return Sent({str(peer): count for peer, count in sent.items()}, number, size, digest)

    async def check_receive(self, wanted: Transfer) -> None:
        """Check a request to receive files, before its stream begins."""
        self.training(_NO_FILES)
        self._senders(wanted)
        self._files.make_folder(wanted.path or RECEIVED)

    async def receive(self, wanted: Transfer) -> ReceivedFile | None:
        """Wait for a file from the peers of a reference, and move it to a folder; return None when the job ends."""
        training, senders = self.training(_NO_FILES), self._senders(wanted)
        return await training.queue.receive(lambda: training.server.translate(senders), wanted.path or RECEIVED)

    def _senders(self, wanted: Transfer) -> frozenset[PeerId]:
        reference = self._peers_reference(wanted, "files are received from peers")
        check_peers(self.context.spec, reference)
        return frozenset(reference.peers) or named_peers(self.context.spec)  # an empty list means all peers

    def _peers_reference(self, wanted: Transfer, why: str) -> PeersReference:
        reference = wanted.reference
        if not isinstance(reference, PeersReference):
            kind = reference.__struct_config__.tag
            raise bad_request(f'type: {kind!r} does not fit here, since {why}: use "peers" and name them in "peers"')
        return reference

    # ---------------------------------------------------------------------------------------------- resources, outputs

    @cached_property
    def _slices(self) -> AssignedSlices:
        """The slices that this task is assigned as a resource."""
        context = self.context
        files, contact = context.fetcher.files, context.contact
        return AssignedSlices(context.attempt, files, contact, _SLICE_TIMEOUT, is_numbered=False)

    async def _fetch_slice(self, name: str, folder: str) -> Sequence[FetchedFile]:
        """Fetch the next slice of a resource that the scheduler assigns to this task."""
        resources = self.context.spec.resources
        datasets = {resource.name: resource.slices.dataset for resource in resources if resource.slices is not None}
        if name not in datasets:
            known = ", ".join([*self.context.resources, *datasets]) or "it has none"
            raise not_found(f"the task has no resource {name!r}; its resources: {known}")
        return await self._slices.fetch(datasets[name], self._files.make_folder(folder or SLICES))

    def _take_resource(self, name: str, place: str, folder: str) -> list[FetchedFile]:
        """Describe a resource where it is, or copy it to a folder and describe the copy."""
        names = [path for path, _ in list_files(name, self._files, place, 1 << 20)]
        root = PurePosixPath(place)
        if not folder:
            files = [self._describe(root, path) for path in names]
        else:
            root = self._files.make_folder(folder)
            root = root / name if names == [""] else root
            files = self._copy_resource(PurePosixPath(place), root, names)
        return [fetched_file(root / file.path, file.size, file.digest, source=f"resource:{name}") for file in files]

    def _describe(self, root: PurePosixPath, path: str) -> StoredFile:
        with self._files.open_file(str(root / path)) as file:
            return describe_file(file, path)

    def _copy_resource(self, source: PurePosixPath, target: PurePosixPath, names: list[str]) -> list[StoredFile]:
        """Copy a resource: a single file replaces one of its name, those of a folder are added."""
        with self._files.staged() as staged:
            for path in names:
                with self._files.open_file(str(source / path)) as file:
                    copy_file(file, staged / path if path else staged, self.context.storage)
            described = describe_files(staged, names)
            if names == [""]:
                self._files.publish(staged, target)
            else:
                self._files.publish_tree(staged, target)
        return list(described)

    async def _store_output(self, name: str, text: str) -> SentOutput:
        """Store a file or folder as an output of the task."""
        if not PurePosixPath(text).parts:
            raise bad_request("path is empty: name the file or folder that is the output")
        with self._translating_errors():
            stored = await self.context.control.store_output(name, text)
        files = [OutputFile(path=file.path, size=file.size, checksum=file.digest) for file in stored.files]
        return SentOutput(output=name, size=stored.size, files=files)

    async def update_progress(self, update: ProgressUpdate) -> ProgressUpdateAnswer:
        """Report progress of the task; return whether it drains."""
        message = None if update.message is None else " ".join(update.message.split())
        self.context.control.report_progress(
            TaskProgress(fraction=update.fraction, message=message, metrics=update.metrics)
        )
        left = self.context.control.drain_seconds
        return ProgressUpdateAnswer(draining=left is not None, seconds_left=left)

    async def record_spans(self, report: SpanReport) -> int:
        """Record an executor's spans in the task's trace; return how many were recorded."""
        return self._spans.record(report, self.context.traceparent)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Translate errors to the answers that the executor gets; report a disk that is full or fails."""
        try:
            yield
        except DiskFaultError as error:
            self._on_disk_fault(error.detail)
            raise
        except BridgeError:
            raise
        except StorageExceededError as error:
            raise storage_exceeded(str(error)) from error
        except ExecutionError as error:
            raise bad_request(str(error)) from error
        except FileExistsError as error:
            raise bad_request(f"{error.filename} exists already: name another folder") from error
        except OSError as error:
            if (reason := disk_fault_of(error, self.context.work_dir)) is None:
                raise
            self._on_disk_fault(reason)
            raise DiskFaultError(reason) from error


MAX_SPANS_PER_JOB: Final = 20_000
"""Further spans are accepted and not recorded."""
_MS: Final = 1000.0


@dataclass(slots=True)
class SpanRecorder:
    """Checks and records the spans of one job's executor."""

    clock: Callable[[], float] = anyio.current_time
    _recorded: int = 0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def record(self, report: SpanReport, job: str | None) -> int:
        """Record a report under the job's span; return how many spans were recorded.

        Args:
            job: ``traceparent`` of the job's execution; None if it belongs to no trace.

        Raises:
            BridgeError: a span began before the job, or names a trace that is not the job's.
        """
        longest = (self.clock() - self._started) * _MS
        for span in _flatten(report.spans):
            if span.ago_ms > longest:
                raise bad_request(
                    f"spans: {span.name!r} began {span.ago_ms:g} ms ago, before the job ({longest:.0f} ms)"
                )
        parent = report.traceparent or job
        if (
            report.traceparent is not None
            and job is not None
            and not instrumentation.same_trace(report.traceparent, job)
        ):
            raise bad_request("spans: traceparent is not one of the job's trace, which TRACEPARENT names")
        if job is None or not instrumentation.enabled():
            return 0
        before = self._recorded
        self._record(report.spans, parent)
        return self._recorded - before

    def _record(self, spans: Sequence[ExecutorSpan], parent: str | None) -> None:
        for span in spans:
            if self._recorded >= MAX_SPANS_PER_JOB:
                return
            self._recorded += 1
            ago, seconds = span.ago_ms / _MS, span.duration_ms / _MS
            about = {"hypha.executor": True, **span.attributes}
            own = instrumentation.record(span.name, about, parent=parent, ago=ago, seconds=seconds, error=span.error)
            self._record(span.inside, own)


def _flatten(spans: Sequence[ExecutorSpan]) -> list[ExecutorSpan]:
    return [span for outer in spans for span in (outer, *_flatten(outer.inside))]
