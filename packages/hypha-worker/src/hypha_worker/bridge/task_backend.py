"""The worker's side of the bridge of one task: its resources, its outputs and its progress.

Called by `routes`; calls `tasks.execution.TaskControl`, which reports to the scheduler and stores outputs. It is
confined to one attempt: its work directory and what its definition names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import PurePosixPath
from typing import Final, NoReturn

from hypha_net import transfer
from hypha_proto.batch_reports import TrainedBatches
from hypha_proto.bridge_api import (
    FetchedFile,
    ReceivedFile,
    ResourceTransfer,
    SpanReport,
    TaskUpdate,
    TaskUpdateAnswer,
    Transfer,
)
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, PeersReference, Reference, SchedulerReference, SliceAddress
from hypha_proto.progress import Progress, ProgressResponse
from hypha_proto.tasks import StoredFile, TaskProgress
from hypha_proto.transfer import OTHER_FILE, TASK_RESULT, PushHeader
from hypha_worker.bridge.backend import ARTIFACTS, OutputFile, Sent, SentOutput
from hypha_worker.bridge.spans import SpanRecorder
from hypha_worker.bridge.uncommitted_updates import PendingFile
from hypha_worker.connectors.assigned_slices import AssignedSlices, slice_file_name
from hypha_worker.connectors.downloads import DownloadedFile
from hypha_worker.errors import (
    BridgeError,
    DiskFaultError,
    ExecutionError,
    StorageExceededError,
    bad_request,
    describe_disk_fault,
    is_disk_fault,
    not_allowed,
    not_found,
    storage_exceeded,
)
from hypha_worker.job_files import JobFiles
from hypha_worker.paths import check_relative, safe_name
from hypha_worker.tasks.execution import TaskContext
from hypha_worker.tasks.output_files import copy_file, describe_file, describe_files, list_files

SLICES: Final = "slices"
"""Folder of slices for which the executor names none."""
_SLICE_TIMEOUT: Final = 45.0
"""Seconds that one question for a slice may take: a scheduler answers within 30 s whether one has become free."""


@dataclass(slots=True)
class TaskBridgeBackend:
    """The `BridgeBackend` of a task."""

    context: TaskContext
    on_disk_fault: Callable[[str], None] = lambda _reason: None
    """Called with the reason when this worker's disk is full or fails."""
    _slices: int = 0
    """Number of slices that were asked for."""
    _spans: SpanRecorder = field(default_factory=SpanRecorder)

    # ---------------------------------------------------------------------------------------------- resources, outputs

    async def fetch_resource(self, wanted: ResourceTransfer) -> Sequence[FetchedFile]:
        """See `BridgeBackend.fetch_resource`."""
        place = self.context.resources.get(wanted.name)
        if place is None and (dataset := self._datasets_of_slices.get(wanted.name)) is not None:
            return [await self._fetch_slice(dataset, wanted.path)]
        if place is None:
            known = ", ".join([*self.context.resources, *self._datasets_of_slices]) or "it has none"
            raise not_found(f"the task has no resource {wanted.name[:80]!r}; its resources: {known}")
        with self._translating_errors():
            return await self.context.storage.run(self._take_resource, wanted.name, place, wanted.path)

    @property
    def _datasets_of_slices(self) -> dict[str, str]:
        """Dataset of each resource of slices."""
        resources = self.context.spec.resources
        return {resource.name: resource.slices.dataset for resource in resources if resource.slices is not None}

    async def _fetch_slice(self, dataset: str, folder: str) -> FetchedFile:
        """Fetch the next slice that the scheduler assigns to this task."""
        context = self.context
        target = self._job_files.make_folder(folder or SLICES)
        slices = AssignedSlices(context.scheduler, context.job_id, context.lease, context.fetcher.files, _SLICE_TIMEOUT)
        self._slices += 1
        number = self._slices
        with self._translating_errors():
            async with context.storage.transfers:
                fetched = await slices.fetch(
                    dataset, lambda assigned: target / slice_file_name(dataset, assigned, number)
                )
        context.traffic.received += fetched.size
        return fetched

    @property
    def _job_files(self) -> JobFiles:
        return self.context.storage.files

    def _take_resource(self, name: str, place: str, folder: str) -> list[FetchedFile]:
        """Describe a resource where it is, or copy it to a folder and describe the copy."""
        names = [path for path, _ in list_files(name, self._job_files, place, 1 << 20)]
        root = PurePosixPath(place)
        if not folder:
            files = [self._describe(root, path) for path in names]
        else:
            root = self._job_files.make_folder(folder)
            root = root / name if names == [""] else root
            files = self._copy_resource(PurePosixPath(place), root, names)
        metadata = {"source": f"resource:{name}", "timestamp": _now()}
        return [
            FetchedFile(path=str(root / file.path), size=file.size, checksum=file.digest, metadata=metadata)
            for file in files
        ]

    def _describe(self, root: PurePosixPath, path: str) -> StoredFile:
        with self._job_files.open_file(str(root / path)) as file:
            return describe_file(file, path)

    def _copy_resource(self, source: PurePosixPath, target: PurePosixPath, names: list[str]) -> list[StoredFile]:
        """Copy a resource: a single file replaces one of its name, those of a folder are added."""
        with self._job_files.staged() as staged:
            for path in names:
                with self._job_files.open_file(str(source / path)) as file:
                    copy_file(file, staged / path if path else staged, self.context.storage)
            described = describe_files(staged, names)
            if names == [""]:
                self._job_files.publish(staged, target)
            else:
                self._job_files.publish_tree(staged, target)
        return list(described)

    async def send_resource(self, wanted: ResourceTransfer) -> SentOutput:
        """See `BridgeBackend.send_resource`."""
        path = check_relative(wanted.path).as_posix()
        if path == ".":
            raise bad_request("path is empty: name the file or folder that is the output")
        with self._translating_errors():
            stored = await self.context.control.store_output(wanted.name, path)
        files = [OutputFile(path=file.path, size=file.size, checksum=file.digest) for file in stored.files]
        return SentOutput(output=wanted.name, size=sum(file.size for file in stored.files), files=files)

    async def update(self, update: TaskUpdate) -> TaskUpdateAnswer:
        """See `BridgeBackend.update`."""
        message = None if update.message is None else " ".join(update.message.split())
        self.context.control.progressed(TaskProgress(fraction=update.fraction, message=message, metrics=update.metrics))
        left = self.context.control.drain_seconds
        return TaskUpdateAnswer(draining=left is not None, seconds_left=left)

    # ----------------------------------------------------------------------------------------------- other references

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """See `BridgeBackend.fetch`: what the executor finds out that it needs, from the Hub, a URL or a named peer."""
        self._check_peers(wanted.reference)
        folder = self._job_files.make_folder(wanted.path or ARTIFACTS)
        with self._translating_errors():
            async with self.context.storage.transfers:
                files = await self._fetch(wanted.reference, folder)
        self.context.traffic.received += sum(file.size for file in files)
        return files

    async def _fetch(self, reference: Reference, folder: PurePosixPath) -> Sequence[FetchedFile]:
        fetcher = self.context.fetcher
        if isinstance(reference, HuggingFaceReference):
            found = await fetcher.download_from_hub(self._with_token(reference), folder)
            return [self._downloaded(file) for file in found]
        if isinstance(reference, PeersReference):
            return [await self._fetch_from_peers(reference, folder)]
        assert not isinstance(reference, SchedulerReference)  # `_check_peers` has refused it
        return [self._downloaded(await fetcher.download_from_uri(reference.value, folder))]

    async def _fetch_from_peers(self, reference: PeersReference, folder: PurePosixPath) -> FetchedFile:
        address = reference.resource
        if address is None:
            raise bad_request("a reference to peers can be fetched only with a resource (dataset and index)")
        target = folder / f"{safe_name(address.dataset)}-{address.index}.safetensors"
        wanted = SliceAddress(dataset=address.dataset, index=address.index)
        pulled, peer = await self.context.fetcher.files.fetch(reference.peers, wanted, target)
        return self._fetched(target, pulled.size, pulled.digest, f"peer:{peer}")

    def _downloaded(self, file: DownloadedFile) -> FetchedFile:
        return self._fetched(file.path, file.size, file.checksum, file.source)

    def _fetched(self, path: PurePosixPath, size: int, checksum: str, source: str) -> FetchedFile:
        metadata = {"source": source, "timestamp": _now()}
        return FetchedFile(path=str(path), size=size, checksum=checksum, metadata=metadata)

    def _with_token(self, reference: HuggingFaceReference) -> HuggingFaceReference:
        """Return the token of the definition with a repository that it names; the executor knows none."""
        for resource in self.context.spec.resources:
            own = resource.huggingface
            if own is not None and own.repository == reference.repository and reference.token is None:
                return HuggingFaceReference(
                    repository=reference.repository,
                    revision=reference.revision,
                    filenames=reference.filenames,
                    token=own.token,
                )
        return reference

    def _check_peers(self, reference: Reference) -> None:
        """Refuse peers that the task's definition does not name."""
        if isinstance(reference, SchedulerReference):
            raise not_allowed("a task has no data of its scheduler: name a dataset among its resources")
        if isinstance(reference, PeersReference) and (unknown := set(reference.peers) - self._named_peers):
            raise not_allowed(f"peer {min(unknown)} is in none of the task's resources")

    @property
    def _named_peers(self) -> frozenset[PeerId]:
        sources = [resource.peers for resource in self.context.spec.resources]
        return frozenset(peer for source in sources if source is not None for peer in source.peers)

    async def send(self, wanted: Transfer) -> Sent:
        """See `BridgeBackend.send`: a result for the scheduler if the definition allows it, or a file for its peers."""
        reference = wanted.reference
        if not isinstance(reference, PeersReference):
            raise bad_request("a file can be sent to peers only, or as an output: {type: Resource, name: …}")
        is_result = self.context.spec.sends is True and set(reference.peers) == {self.context.scheduler}
        if not is_result:
            self._check_peers(reference)
        kind = TASK_RESULT if is_result else OTHER_FILE
        with self._translating_errors(), self._job_files.open_file(wanted.path) as file:
            return await self._send(reference, wanted, kind, file)

    async def _send(self, reference: PeersReference, wanted: Transfer, kind: str, file: FileIO) -> Sent:
        size, digest = await transfer.describe(file)
        header = PushHeader(
            job_id=self.context.job_id,
            round=wanted.round or 0,
            kind=kind,
            name=PurePosixPath(wanted.path).name,
            size=size,
            digest=digest,
            samples=wanted.samples or 0,
            lease=self.context.lease,
            scheduler=self.context.scheduler,
        )
        sent = await self.context.fetcher.files.push(reference, file, header)
        return Sent({str(peer): count for peer, count in sent.items()}, header.round, size, digest)

    # --------------------------------------------------------------------------------- what only training jobs have

    async def check_receive(self, _wanted: Transfer) -> NoReturn:
        """See `BridgeBackend.check_receive`."""
        raise bad_request("a task has no files of peers to receive: its resources are there, see /resources/fetch")

    async def next_pending_file(self, _wanted: Transfer) -> PendingFile | None:
        """See `BridgeBackend.next_pending_file`; never called, because `check_receive` refuses."""
        return None

    async def claim_file(self, _wanted: Transfer, _file: PendingFile) -> ReceivedFile | None:
        """See `BridgeBackend.claim_file`; never called."""
        return None

    async def report(self, _progress: Progress) -> ProgressResponse:
        """See `BridgeBackend.report`."""
        raise bad_request("a task has no rounds to report, use /task/update")

    async def report_batches(self, _trained: TrainedBatches) -> NoReturn:
        """See `BridgeBackend.report_batches`."""
        raise bad_request("a task has no rounds to report, use /task/update")

    async def join_round(self) -> NoReturn:
        """See `BridgeBackend.join_round`."""
        raise bad_request("a task has no rounds to join")

    async def record_spans(self, report: SpanReport) -> int:
        """See `BridgeBackend.record_spans`."""
        return self._spans.record(report, self.context.traceparent)

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Translate errors to the answers that the executor gets; report a disk that is full or fails."""
        try:
            yield
        except DiskFaultError as error:
            self.on_disk_fault(error.detail)
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
            if not is_disk_fault(error):
                raise
            reason = describe_disk_fault(error, self.context.work_dir)
            self.on_disk_fault(reason)
            raise DiskFaultError(reason) from error


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
