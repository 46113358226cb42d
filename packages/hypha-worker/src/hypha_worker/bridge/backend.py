"""What the bridge does for one job, on the worker's side: fetch, send, receive and report.

`bridge.app` turns HTTP into calls of this class, `connectors` do the moving. It is confined to one job: its work
directory, its references, its scheduler.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import anyio
import msgspec

from hypha_net import instrumentation, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.bridge_api import FetchedFile, ReceivedFile, SpanReport, Transfer
from hypha_proto.datasets import DataRequest
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    HuggingFaceReference,
    JobSpec,
    PeersReference,
    Reference,
    SchedulerReference,
    SliceAddress,
    TrainJob,
    UriReference,
)
from hypha_proto.progress import REPORT, BatchDone, Progress, ProgressRequest, ProgressResponse
from hypha_proto.transfer import PSEUDO_GRADIENT, PushHeader
from hypha_worker.bridge.delivery_queue import DeliveryQueue, PendingFile
from hypha_worker.bridge.spans import SpanRecorder
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import DownloadedFile, download_from_hub, download_from_uri
from hypha_worker.connectors.peer_files import PeerFiles, call_with_retries, request_slice, to_bridge_error
from hypha_worker.errors import bad_request, not_allowed
from hypha_worker.jobs.references import check_peers, with_secrets
from hypha_worker.paths import check_relative, relative_text, resolve_file, resolve_folder, safe_name

REPORT_DELAYS: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt at a report: a scheduler that is away for a quarter of a minute loses no job."""
MAX_OTHERS: Final = 8
"""Other providers of a slice that are asked in turn."""


_SLICES: Final = instrumentation.Counter("hypha.worker.slices", "{slice}", "Slices that were fetched.")
_SLICE_BYTES: Final = instrumentation.Counter("hypha.worker.slice.io", "By", "Bytes of fetched slices.")
_SLICE_SECONDS: Final = instrumentation.Histogram(
    "hypha.worker.slice.duration", "s", "From asking for a slice to having it."
)
_SAMPLES: Final = instrumentation.Counter("hypha.worker.samples", "{sample}", "Samples in batches that were reported.")
_AHEAD: Final = instrumentation.Level("hypha.worker.prefetch.depth", "{slice}", "Slices fetched and not begun, a job.")


class Sent(msgspec.Struct, frozen=True):
    """Answer of ``/resources/send``."""

    sent: dict[str, int]
    """Peer id to bytes."""
    round: int
    size: int
    checksum: str


class BridgeBackend(Protocol):
    """What the HTTP side needs of the worker's side. Every method may raise `BridgeError`."""

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """Bring what a reference names to the work directory."""
        ...

    async def send(self, wanted: Transfer) -> Sent:
        """Push a file of the work directory to the peers of a reference."""
        ...

    async def check_receive(self, wanted: Transfer) -> None:
        """Refuse what can never be received."""
        ...

    async def next_pending_file(self, wanted: Transfer) -> PendingFile | None:
        """Wait for a file from the peers of a reference; none when the job ends."""
        ...

    async def claim_file(self, wanted: Transfer, file: PendingFile) -> ReceivedFile | None:
        """Move a delivered file to where the executor wants it; none when another stream has it."""
        ...

    async def report(self, progress: Progress) -> ProgressResponse:
        """Tell the scheduler how the job advances; gives its answer."""
        ...

    async def record_spans(self, report: SpanReport) -> int:
        """Take an executor's spans into the job's trace; gives how many were recorded."""
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
    """The span of the job's execution, which everything here is part of."""
    _fetched: int = 0
    _ahead: dict[str, None] = field(default_factory=dict)
    """Slices that were fetched and of which no batch has been reported yet."""
    _round: int = field(init=False)
    _spans: SpanRecorder = field(default_factory=SpanRecorder)

    def __post_init__(self) -> None:
        executor = self.spec.executor
        self._round = (executor.config.first_round or 1) if isinstance(executor, TrainJob) else 1

    async def fetch(self, wanted: Transfer) -> Sequence[FetchedFile]:
        """See `BridgeBackend.fetch`."""
        check_peers(self.spec, wanted.reference)
        reference = with_secrets(self.spec, wanted.reference)
        self._fetched += 1
        if isinstance(reference, SchedulerReference):
            began = anyio.current_time()
            with instrumentation.span(
                "fetch slice", {"hypha.dataset": reference.dataset}, parent=self.traceparent
            ) as span:
                fetched = await self._fetch_slice(reference, wanted.path or "slices")
                span.set({"hypha.slice": fetched.metadata["slice"], "hypha.file.size": fetched.size})
            self._account(fetched, anyio.current_time() - began)
            return [fetched]
        with instrumentation.span("fetch", {"hypha.reference": type(reference).__name__}, parent=self.traceparent):
            return await self._fetch_artifact(reference, wanted)

    def _account(self, fetched: FetchedFile, seconds: float) -> None:
        """Count a slice that has come."""
        about = {"hypha.dataset": fetched.metadata["dataset"]}
        _SLICES.add(1, about)
        _SLICE_BYTES.add(fetched.size, about)
        _SLICE_SECONDS.record(seconds, about)
        self._ahead[fetched.metadata["slice"]] = None
        _AHEAD.set(len(self._ahead), self._job)

    @property
    def _job(self) -> instrumentation.Attributes:
        return {"hypha.job.id": str(self.spec.job_id)}

    async def _fetch_artifact(self, reference: Reference, wanted: Transfer) -> Sequence[FetchedFile]:
        folder = resolve_folder(self.work_dir, wanted.path or f"artifacts/{self._fetched}")
        if isinstance(reference, PeersReference):
            return await self._fetch_from_peers(reference, folder)
        limit = self.files.max_bytes
        if isinstance(reference, HuggingFaceReference):
            found = await download_from_hub(reference, folder, self.access, max_bytes=limit)
        else:
            assert isinstance(reference, UriReference)
            found = [await download_from_uri(reference.value, folder, self.access, max_bytes=limit)]
        return [self._downloaded(file) for file in found]

    async def _fetch_slice(self, reference: SchedulerReference, path: str) -> FetchedFile:
        executor = self.spec.executor
        if not isinstance(executor, TrainJob) or reference != executor.config.data:
            raise not_allowed(f"dataset {reference.dataset[:80]!r} is not the data of this job")
        folder, number = resolve_folder(self.work_dir, path), self._fetched
        request = DataRequest(dataset=reference.dataset, job_id=self.spec.job_id, id=uuid.uuid4())
        assigned = await request_slice(self.endpoint, reference.peer, request)
        target = folder / f"{safe_name(reference.dataset)}-{assigned.index}-{number}.safetensors"
        address = SliceAddress(dataset=reference.dataset, index=assigned.index)
        providers = [assigned.data_provider, *(assigned.others or ())[:MAX_OTHERS]]
        pulled, peer = await self.files.pull(providers, address, target, assigned.digest)
        extra = {"dataset": reference.dataset, "slice": str(assigned.index), "epoch": str(assigned.epoch or 0)}
        return self._pulled(target, pulled, peer, extra)

    async def _fetch_from_peers(self, reference: PeersReference, folder: Path) -> Sequence[FetchedFile]:
        address = reference.resource
        if address is None:
            raise bad_request("a reference to peers can be fetched only with a resource (dataset and index)")
        names = reference.filenames or (f"{safe_name(address.dataset)}-{address.index}.safetensors",)
        made = []
        for index, name in enumerate(names, address.index):
            target = folder / check_relative(name)
            resolve_folder(self.work_dir, relative_text(self.work_dir, target.parent))
            pulled, peer = await self.files.pull(
                reference.peers, SliceAddress(dataset=address.dataset, index=index), target
            )
            made.append(self._pulled(target, pulled, peer, {}))
        return made

    def _pulled(self, path: Path, pulled: transfer.PullResult, peer: PeerId, extra: dict[str, str]) -> FetchedFile:
        metadata = {"source": f"peer:{peer}", "timestamp": _now(), **extra}
        return FetchedFile(
            path=relative_text(self.work_dir, path), size=pulled.size, checksum=pulled.digest, metadata=metadata
        )

    def _downloaded(self, file: DownloadedFile) -> FetchedFile:
        source, _, origin = file.source.partition(":")
        hub = source == "huggingface"
        metadata = {"source": source, "origin": origin} if hub else {"source": file.source}
        metadata["timestamp"] = _now()
        return FetchedFile(
            path=relative_text(self.work_dir, file.path), size=file.size, checksum=file.checksum, metadata=metadata
        )

    async def send(self, wanted: Transfer) -> Sent:
        """See `BridgeBackend.send`."""
        reference = wanted.reference
        if not isinstance(reference, PeersReference):
            raise bad_request("a file can be sent to peers only")
        check_peers(self.spec, reference)
        path = resolve_file(self.work_dir, wanted.path)
        # executors in the field do not number their rounds: then each send is the next one
        number = self._round if wanted.round is None else wanted.round
        size, digest = await transfer.describe(path)
        header = PushHeader(
            job_id=self.spec.job_id,
            round=number,
            kind=PSEUDO_GRADIENT if reference == self.spec.executor.config.updates else "file",
            name=path.name,
            size=size,
            digest=digest,
            samples=wanted.samples or 0,
        )
        about = {"hypha.round": number, "hypha.file.size": size}
        with instrumentation.span(f"send {header.kind}", about, parent=self.traceparent):
            sent = await self.files.push(reference, path, header)
        self._round = number + 1
        return Sent({str(peer): count for peer, count in sent.items()}, number, size, digest)

    async def check_receive(self, wanted: Transfer) -> None:
        """See `BridgeBackend.check_receive`."""
        self._senders(wanted)
        resolve_folder(self.work_dir, wanted.path or "received")

    async def next_pending_file(self, wanted: Transfer) -> PendingFile | None:
        """See `BridgeBackend.next_pending_file`."""
        return await self.queue.next_file(self._senders(wanted))

    def _senders(self, wanted: Transfer) -> frozenset[PeerId]:
        if not isinstance(wanted.reference, PeersReference):
            raise bad_request("files can be received from peers only")
        check_peers(self.spec, wanted.reference)
        return frozenset(wanted.reference.peers) or frozenset(self.queue.senders)  # naming nobody means anybody

    async def claim_file(self, wanted: Transfer, file: PendingFile) -> ReceivedFile | None:
        """See `BridgeBackend.claim_file`."""
        return self.queue.claim(file, resolve_folder(self.work_dir, wanted.path or "received"))

    async def report(self, progress: Progress) -> ProgressResponse:
        """See `BridgeBackend.report`."""
        if isinstance(progress, BatchDone):
            self._begin_slices(progress)
            with instrumentation.attached(None):  # batches are too many for the trace of a job
                return await self._report(progress)
        name = type(progress).__name__
        with instrumentation.span("report", {"hypha.report": name}, parent=self.traceparent):
            return await self._report(progress)

    def _begin_slices(self, batch: BatchDone) -> None:
        _SAMPLES.add(batch.batch_size)
        for index in batch.slices or ():
            self._ahead.pop(index, None)
        _AHEAD.set(len(self._ahead), self._job)

    async def record_spans(self, report: SpanReport) -> int:
        """See `BridgeBackend.record_spans`."""
        return self._spans.record(report, self.traceparent)

    def close(self) -> None:
        """The job is over."""
        _AHEAD.forget(self._job)

    async def _report(self, progress: Progress) -> ProgressResponse:
        request = ProgressRequest(job_id=self.spec.job_id, progress=progress, lease=self.lease, id=uuid.uuid4())
        try:
            return await call_with_retries(
                self.endpoint, self.scheduler, REPORT, request, timeout=30.0, delays=REPORT_DELAYS
            )
        except NetError as error:
            raise to_bridge_error(error) from error


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
