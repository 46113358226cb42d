"""The worker's side of the bridge of one job: fetch, send, receive and report.

Called by `routes`, which turns HTTP requests into calls of this class; calls `connectors`, which transfer the files. It
is confined to one job: its work directory, its references and its scheduler.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final, Protocol, TypedDict

import msgspec

from hypha_net import instrumentation, transfer
from hypha_net.endpoint import Endpoint
from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import (
    FetchedFile,
    ReceivedFile,
    ResourceTransfer,
    RoundJoined,
    SpanReport,
    TaskUpdate,
    TaskUpdateAnswer,
    Transfer,
)
from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    AggregateJob,
    HuggingFaceReference,
    JobSpec,
    PeersReference,
    Reference,
    SchedulerReference,
    SliceAddress,
    TrainJob,
    UriReference,
)
from hypha_proto.progress import (
    BatchDone,
    OuterStepTaken,
    Progress,
    ProgressResponse,
    RoundMetrics,
    SendingUpdate,
    TrainedBatch,
    UpdateMerged,
)
from hypha_proto.transfer import OTHER_FILE, PSEUDO_GRADIENT, PushHeader
from hypha_worker.bridge.current_server import CurrentServer
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.bridge.progress_reports import ProgressReports
from hypha_worker.bridge.round_commits import RoundCommits, check_contribution
from hypha_worker.bridge.spans import SpanRecorder
from hypha_worker.bridge.uncommitted_updates import PendingFile
from hypha_worker.bridge.update_sender import UpdateSender
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.assigned_slices import AssignedSlices, AssignmentOrder, slice_file_name
from hypha_worker.connectors.downloads import DownloadedFile, download_all_from_uri, download_from_hub
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import (
    DiskFaultError,
    bad_request,
    describe_disk_fault,
    is_disk_fault,
    never_joins,
    not_allowed,
    peer_failed,
    round_closed,
    update_refused,
)
from hypha_worker.job_files import JobFiles
from hypha_worker.jobs.references import check_peers, job_references, reference_peers, with_secrets
from hypha_worker.paths import check_relative, safe_name

_log = logging.getLogger(__name__)

ARTIFACTS: Final = "artifacts"
"""Folder of what is fetched by a bare reference, which executors of the older network load the model from."""
FIRST_SLICE: Final = "0"
"""Name of a slice that is fetched by a bare reference: its position in the answer. The next one replaces it, so that
executors that delete none do not fill the job's storage."""

_SAMPLES: Final = instrumentation.Counter("hypha.worker.samples", "{sample}", "Samples in batches that were reported.")
_PREFETCHED: Final = instrumentation.Level(
    "hypha.worker.prefetch.depth", "{slice}", "Slices fetched and not begun, a job."
)
_REPORT_NAMES: Final[Mapping[type[Progress], str]] = {
    RoundMetrics: "RoundMetrics",
    SendingUpdate: "Update",
    OuterStepTaken: "Updated",
    UpdateMerged: "UpdateReceived",
}
"""Values of the span attribute ``hypha.report``, which dashboards may filter on: independent of class names."""


class Sent(msgspec.Struct, frozen=True):
    """The answer of ``/resources/send``."""

    sent: dict[str, int]
    """Bytes sent, by peer id."""
    round: int
    size: int
    checksum: str


class OutputFile(TypedDict):
    """A file of a stored output."""

    path: str
    """Relative to the output; empty where it is a single file."""
    size: int
    checksum: str


class SentOutput(TypedDict):
    """The answer of ``/resources/send`` for an output of a task."""

    output: str
    size: int
    """Bytes of all its files."""
    files: list[OutputFile]


class BridgeBackend(Protocol):
    """The worker's side, as `routes` calls it. Every method may raise `BridgeError`."""

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """Fetch what a reference names into the work directory."""
        ...

    async def send(self, wanted: Transfer) -> Sent:
        """Push a file of the work directory to the peers of a reference."""
        ...

    async def check_receive(self, wanted: Transfer) -> None:
        """Check a request to receive files, before its stream begins."""
        ...

    async def next_pending_file(self, wanted: Transfer) -> PendingFile | None:
        """Wait for a file from the peers of a reference; return None when the job ends."""
        ...

    async def claim_file(self, wanted: Transfer, file: PendingFile) -> ReceivedFile | None:
        """Move a queued file to the executor's folder; return None if another stream has claimed it."""
        ...

    async def report(self, progress: Progress) -> ProgressResponse:
        """Report progress to the scheduler; return its answer."""
        ...

    async def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        """Report several batches to the scheduler; return which it has counted. It may be silent for a while."""
        ...

    async def join_round(self) -> RoundJoined:
        """Wait until the scheduler says with which round the executor begins."""
        ...

    async def fetch_resource(self, wanted: ResourceTransfer) -> Sequence[FetchedFile]:
        """Return the files of a task's resource, copied to a folder if the request names one."""
        ...

    async def send_resource(self, wanted: ResourceTransfer) -> SentOutput:
        """Store a file or folder as an output of a task."""
        ...

    async def update(self, update: TaskUpdate) -> TaskUpdateAnswer:
        """Report progress of a task."""
        ...

    async def record_spans(self, report: SpanReport) -> int:
        """Record an executor's spans in the job's trace; return how many were recorded."""
        ...


@dataclass(slots=True)
class JobBridgeBackend:
    """The `BridgeBackend` of a training job."""

    endpoint: Endpoint
    spec: JobSpec
    lease: uuid.UUID
    scheduler: PeerId
    work_dir: Path
    queue: DeliveryQueue
    access: AccessPolicy
    files: PeerFiles
    traceparent: str | None = None
    """The span of the job's execution, the parent of all spans here."""
    contact: SchedulerContact | None = None
    """Waits for the scheduler as long as the job may run on without it; by default not longer than other requests."""
    on_disk_fault: Callable[[str], None] = lambda _reason: None
    """Called with the reason when this worker's disk is full or fails."""
    server: CurrentServer = field(init=False)
    updates: UpdateSender = field(init=False)
    reports: ProgressReports = field(init=False)
    _has_joined: bool = False
    """Whether the executor has asked with which round it begins."""
    _fetched: int = 0
    _assignments: AssignmentOrder = field(default_factory=AssignmentOrder)
    _prefetched: dict[str, None] = field(default_factory=dict)
    """Fetched slices of which no batch was reported yet. A dict, because it is ordered."""
    _next_numbers: dict[str, int] = field(default_factory=dict)
    """Round of the next file of each kind, for executors that name none."""
    _recorded: tuple[int, int] = (0, 0)
    """Round of the last batches that were reported several at once, and their number in it."""
    _spans: SpanRecorder = field(default_factory=SpanRecorder)

    def __post_init__(self) -> None:
        executor = self.spec.executor
        self.server = CurrentServer(self.spec)
        self.updates = UpdateSender(self.files, self.server, waits=self._joins)
        takes_batches = self.server.term is not None  # other strategies answer each batch
        self.reports = ProgressReports(self.spec.job_id, self.lease, self._contact, takes_batches=takes_batches)
        if isinstance(executor, TrainJob) and executor.config.first_round:
            self._next_numbers[PSEUDO_GRADIENT] = executor.config.first_round

    @property
    def _joins(self) -> bool:
        """Whether executors of the job join and leave its rounds."""
        executor = self.spec.executor
        return isinstance(executor, TrainJob) and bool(executor.config.join)

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """See `BridgeBackend.fetch`."""
        check_peers(self.spec, wanted.reference)
        async with self.files.storage.transfers:
            with self._reporting_disk_faults():
                fetched = await self._fetch(wanted)
        self.files.traffic.received += sum(file.size for file in fetched)
        return fetched

    @contextmanager
    def _reporting_disk_faults(self) -> Iterator[None]:
        try:
            yield
        except DiskFaultError as error:
            self.on_disk_fault(error.detail)
            raise
        except OSError as error:
            if not is_disk_fault(error):
                raise
            reason = describe_disk_fault(error, self.work_dir)
            self.on_disk_fault(reason)
            raise DiskFaultError(reason) from error

    async def _fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        reference = with_secrets(self.spec, wanted.reference)
        self._fetched += 1
        if isinstance(reference, SchedulerReference):
            with instrumentation.span(
                "fetch slice", {"hypha.dataset": reference.dataset}, parent=self.traceparent
            ) as span:
                fetched = await self._fetch_slice(reference, wanted.path)
                span.set({"hypha.slice": fetched.metadata["slice"], "hypha.file.size": fetched.size})
            self._prefetched[fetched.metadata["slice"]] = None
            _PREFETCHED.set(len(self._prefetched), self._job)
            return [fetched]
        with instrumentation.span("fetch", {"hypha.reference": type(reference).__name__}, parent=self.traceparent):
            return await self._fetch_artifact(reference, wanted)

    @property
    def _job_files(self) -> JobFiles:
        return self.files.storage.files

    @property
    def _job(self) -> instrumentation.Attributes:
        return {"hypha.job.id": str(self.spec.job_id), "hypha.lease.id": str(self.lease)}

    async def _fetch_artifact(self, reference: Reference, wanted: Transfer) -> Sequence[FetchedFile]:
        folder = self._job_files.make_folder(wanted.path or ARTIFACTS)
        if isinstance(reference, PeersReference):
            return await self._fetch_from_peers(reference, folder, is_bare=not wanted.path)
        storage = self.files.storage
        if isinstance(reference, HuggingFaceReference):
            found = await download_from_hub(reference, folder, self.access, storage=storage)
        else:
            assert isinstance(reference, UriReference)
            found = await download_all_from_uri(reference.value, folder, self.access, storage=storage, files=self.files)
        return [self._downloaded(file) for file in found]

    async def _fetch_slice(self, reference: SchedulerReference, path: str) -> FetchedFile:
        executor = self.spec.executor
        if not isinstance(executor, TrainJob) or reference != executor.config.data:
            raise not_allowed(f"dataset: {reference.dataset[:80]!r} is not the data of this job{_data_text(executor)}")
        folder, number = self._job_files.make_folder(path or ARTIFACTS), self._fetched
        slices = AssignedSlices(
            reference.peer, self.spec.job_id, self.lease, self.files, contact=self._contact, order=self._assignments
        )
        fetched = await slices.fetch(
            reference.dataset,
            lambda assigned: folder / (slice_file_name(reference.dataset, assigned, number) if path else FIRST_SLICE),
        )
        if self._joins and not self._has_joined:  # it does not ask, and begins with `first_round`
            self.queue.join(executor.config.first_round or 1)
        return fetched

    async def _fetch_from_peers(
        self, reference: PeersReference, folder: PurePosixPath, is_bare: bool
    ) -> Sequence[FetchedFile]:
        address = reference.resource
        if address is None:
            raise bad_request('resource: none is given: add {"dataset": …, "index": …}, which the peers serve')
        slice_name = FIRST_SLICE if is_bare else f"{safe_name(address.dataset)}-{address.index}.safetensors"
        names = reference.filenames or (slice_name,)
        files = []
        for index, name in enumerate(names, address.index):
            target = folder / check_relative(name)
            self._job_files.make_folder(str(target.parent))
            pulled, peer = await self.files.fetch(
                reference.peers, SliceAddress(dataset=address.dataset, index=index), target
            )
            files.append(self._pulled(target, pulled, peer))
        return files

    def _pulled(self, path: PurePosixPath, pulled: transfer.PullResult, peer: PeerId) -> FetchedFile:
        metadata = {"source": f"peer:{peer}", "timestamp": _now()}
        return FetchedFile(path=str(path), size=pulled.size, checksum=pulled.digest, metadata=metadata)

    def _downloaded(self, file: DownloadedFile) -> FetchedFile:
        source, _, origin = file.source.partition(":")
        hub = source == "huggingface"
        metadata = {"source": source, "origin": origin} if hub else {"source": file.source}
        metadata["timestamp"] = _now()
        return FetchedFile(path=str(file.path), size=file.size, checksum=file.checksum, metadata=metadata)

    async def send(self, wanted: Transfer) -> Sent:
        """See `BridgeBackend.send`."""
        reference = _peers_reference(wanted, "a file is sent to peers")
        if not reference.peers:
            raise bad_request("peers: [] names no receiver: name one or more of the peers of this job's references")
        check_peers(self.spec, reference)
        with self._job_files.open_file(wanted.path) as file:  # what takes its place from now on is not sent
            return await self._send(reference, wanted, file)

    async def pull_from_scheduler(self, address: SliceAddress, target: Path, digest: str) -> transfer.PullResult:
        """Pull a file that the scheduler serves; `target` lies in the staging folder. Raises `BridgeError`."""
        with self._reporting_disk_faults():
            pulled, _ = await self.files.pull([self.scheduler], address, target, digest)
        self.files.traffic.received += pulled.size
        return pulled

    async def _send(self, reference: PeersReference, wanted: Transfer, file: FileIO) -> Sent:
        kind = self._kind_for(reference.peers)
        # older executors send no round number: then each send is the next round
        number = self._next_numbers.get(kind, 1) if wanted.round is None else wanted.round
        size, digest = await transfer.describe(file)
        if wanted.contribution is not None:
            if kind != PSEUDO_GRADIENT:
                raise bad_request("contribution: only a file for the peers of `updates` has one: leave it out")
            check_contribution(wanted.contribution, number, digest)
        header = PushHeader(
            job_id=self.spec.job_id,
            round=number,
            kind=kind,
            name=PurePosixPath(wanted.path).name,
            size=size,
            digest=digest,
            samples=wanted.samples or 0,
            lease=self.lease,
            scheduler=self.scheduler,
        )
        if kind == PSEUDO_GRADIENT and self.server.term is not None:
            sent = await self._send_update(reference, file, header, wanted.contribution)
        else:
            sent = await self._push(reference, file, header)
        self._next_numbers[kind] = number + 1
        return Sent({str(peer): count for peer, count in sent.items()}, number, size, digest)

    async def _push(self, reference: PeersReference, file: FileIO, header: PushHeader) -> dict[PeerId, int]:
        with self._send_span(header):
            return await self.files.push(self.server.translate_reference(reference), file, header)

    def _send_span(self, header: PushHeader) -> instrumentation.Span:
        about = {"hypha.round": header.round, "hypha.file.size": header.size}
        return instrumentation.span(f"send {header.kind}", about, parent=self.traceparent)

    async def _send_update(
        self, reference: PeersReference, file: FileIO, header: PushHeader, contribution: Contribution | None
    ) -> dict[PeerId, int]:
        """State an update to the scheduler and push it; push it alone to a scheduler that commits no rounds."""

        async def state() -> bool:
            return await self._state_contribution(header, contribution)

        # kept before it is stated: the scheduler may replace the parameter server as soon as it knows of the update
        self.updates.keep(reference, file, msgspec.structs.replace(header, contribution=contribution))
        try:
            if not await state():
                self.updates.forget()
                return await self._push(reference, file, header)
            with self._send_span(header):
                return await self.updates.send(state)
        except BaseException:
            self.updates.forget()
            raise

    async def _state_contribution(self, header: PushHeader, contribution: Contribution | None) -> bool:
        """Tell the scheduler what an update was computed from; return False if it commits no rounds.

        Raises:
            BridgeError: the update does not count.
        """
        number = header.round
        with instrumentation.span("state contribution", {"hypha.round": number}, parent=self.traceparent):
            answer = await self._commits.state_contribution(number, header.digest, header.samples, contribution)
        if answer is None or answer.accepted:
            return answer is not None
        why = f"the scheduler does not accept the update of round {number}: {answer.reason[:1000]}"
        if not answer.rejoin or not self._has_joined:
            raise update_refused(why)
        self.queue.leave()
        raise round_closed(f"{why}; ask /rounds/join with which round to begin")

    @property
    def _commits(self) -> RoundCommits:
        return RoundCommits(self.endpoint, self.scheduler, self.spec.job_id, self.lease, self.contact)

    async def join_round(self) -> RoundJoined:
        """See `BridgeBackend.join_round`. What the executor has trained and not sent before is given up."""
        if not self._joins:
            raise bad_request("join: this job's executors begin with `first_round`, or 1, and need not ask")
        self._has_joined = True
        self._recorded = (0, 0)
        self.updates.forget()
        self.queue.leave()
        with instrumentation.span("join round", parent=self.traceparent):
            answer = await self._commits.join()
        if answer is None:
            raise peer_failed("the scheduler does not know rounds to join: update hypha-scheduler")
        if answer.round is None:
            raise never_joins(f"this executor takes part in no round: {answer.reason[:1000]}")
        self.queue.join(answer.round)
        return RoundJoined(round=answer.round, weights=answer.weights)

    def _kind_for(self, peers: Sequence[PeerId]) -> str:
        """Return the kind of a file: one that goes only to peers which get the job's updates is an update."""
        updated = reference_peers([self.spec.executor.config.updates])
        return PSEUDO_GRADIENT if updated.issuperset(peers) else OTHER_FILE

    async def check_receive(self, wanted: Transfer) -> None:
        """See `BridgeBackend.check_receive`."""
        self._senders(wanted)
        self._job_files.make_folder(wanted.path or "received")

    async def next_pending_file(self, wanted: Transfer) -> PendingFile | None:
        """See `BridgeBackend.next_pending_file`."""
        senders = self._senders(wanted)
        return await self.queue.next_file(lambda: self.server.translate(senders))

    def _senders(self, wanted: Transfer) -> frozenset[PeerId]:
        reference = _peers_reference(wanted, "files are received from peers")
        check_peers(self.spec, reference)
        return frozenset(reference.peers) or reference_peers(job_references(self.spec))  # an empty list means all peers

    async def claim_file(self, wanted: Transfer, file: PendingFile) -> ReceivedFile | None:
        """See `BridgeBackend.claim_file`."""
        return self.queue.claim(file, self._job_files.make_folder(wanted.path or "received"))

    async def report(self, progress: Progress) -> ProgressResponse:
        """See `BridgeBackend.report`."""
        if isinstance(progress, BatchDone):
            self._record_batch(progress)
            with instrumentation.attached(None):  # a job has too many batches for its trace
                return await self.reports.report_batch(progress)
        with instrumentation.span("report", {"hypha.report": _REPORT_NAMES[type(progress)]}, parent=self.traceparent):
            return await self.reports.report(progress)

    async def report_batches(self, trained: TrainedBatches) -> BatchesCounted:
        """See `BridgeBackend.report_batches`."""
        for batch in self._not_recorded(trained):
            self._record_batch(batch)
        with instrumentation.attached(None):
            return await self.reports.report_batches(trained)

    def _not_recorded(self, trained: TrainedBatches) -> Sequence[TrainedBatch]:
        """Return the batches that the executor reports for the first time."""
        number, before = self._recorded
        known = max(0, before - trained.first) if number == trained.round else 0
        self._recorded = (trained.round, max(trained.first + len(trained.batches), known + trained.first))
        return trained.batches[known:]

    def _record_batch(self, batch: TrainedBatch) -> None:
        _SAMPLES.add(batch.batch_size)
        for index in batch.slices or ():
            self._prefetched.pop(index, None)
        _PREFETCHED.set(len(self._prefetched), self._job)

    async def fetch_resource(self, wanted: ResourceTransfer) -> Sequence[FetchedFile]:
        """See `BridgeBackend.fetch_resource`; a training job has no resources."""
        raise bad_request(f"a training job has no resource {wanted.name[:80]!r}: fetch the references of its spec")

    async def send_resource(self, wanted: ResourceTransfer) -> SentOutput:
        """See `BridgeBackend.send_resource`; a training job has no outputs."""
        raise bad_request(f"a training job has no output {wanted.name[:80]!r}: send files to the peers of `updates`")

    async def update(self, update: TaskUpdate) -> TaskUpdateAnswer:
        """See `BridgeBackend.update`; a training job reports in another way."""
        raise bad_request("a training job has no task to update: use /status/send")

    async def record_spans(self, report: SpanReport) -> int:
        """See `BridgeBackend.record_spans`."""
        return self._spans.record(report, self.traceparent)

    def close(self) -> None:
        """Remove the job's gauge, and close the newest update."""
        self.updates.forget()
        _PREFETCHED.forget(self._job)

    @property
    def _contact(self) -> SchedulerContact:
        return self.contact or SchedulerContact(self.endpoint, self.scheduler)


def _peers_reference(wanted: Transfer, why: str) -> PeersReference:
    reference = wanted.reference
    if not isinstance(reference, PeersReference):
        kind = reference.__struct_config__.tag
        raise bad_request(f'type: {kind!r} does not fit here, since {why}: use "peers" and name them in "peers"')
    return reference


def _data_text(executor: TrainJob | AggregateJob) -> str:
    """Return which dataset a job may fetch, for an error."""
    if not isinstance(executor, TrainJob) or not isinstance(executor.config.data, SchedulerReference):
        return ", which has none of a scheduler"
    return f": fetch {executor.config.data.dataset[:80]!r} of scheduler {executor.config.data.peer}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
