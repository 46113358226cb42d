"""What a strategy may use of the scheduler: datasets, artifacts and notices of its own job. Created by `runner`."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from hypha_net.endpoint import Endpoint
from hypha_net.transfer import PullSource
from hypha_proto.datasets import MANIFEST, AssignedSlice
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import One, PeersReference
from hypha_proto.task_resources import FailedHolder, ResourceLocation
from hypha_proto.tasks import DatasetSource, StoredOutput
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.allocation.auction import AuctionTable
from hypha_scheduler.datasets.dataset import DatasetView, open_dataset, open_folder
from hypha_scheduler.datasets.providers import Providers
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import (
    Artifact,
    ArtifactCopies,
    artifact_dataset,
    download_repository,
    served_copy,
)
from hypha_scheduler.jobs.config import MODEL_COMMAND, ArtifactTable, DatasetTable
from hypha_scheduler.jobs.events import EndRecorder
from hypha_scheduler.jobs.output_download import download_output
from hypha_scheduler.jobs.resource_locations import gone, locate_slices
from hypha_scheduler.jobs.source_download import SourceAccess, SourceDownloads, presign
from hypha_scheduler.jobs.source_tables import S3Table
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import SliceToUse

if TYPE_CHECKING:
    from hypha_scheduler.jobs.runner import JobRunner


@dataclass(frozen=True, slots=True)
class JobHost:
    """What a scheduler gives to all of its jobs."""

    endpoint: Endpoint
    runs: Path
    """Jobs write to directories in it."""
    bridge: StatusBridge | None = None
    auction: AuctionTable = field(default_factory=AuctionTable)
    model_command: Sequence[str] = MODEL_COMMAND
    """Creates a start model from a configuration; see `model_creation`."""
    access: SourceAccess = field(default_factory=SourceAccess)
    """What `s3`, `uri` and `dht` of a job may reach from here."""
    ends: EndRecorder = field(default_factory=EndRecorder)
    """Records the ends of jobs, also after they have ended: its `run` runs in the background."""

    @property
    def downloads(self) -> SourceDownloads:
        """Fetches what `s3`, `uri` and `dht` of a job name."""
        return SourceDownloads(self.endpoint, self.access)


@dataclass(slots=True)
class RunnerContext:
    """`strategies.base.JobContext` of one job, and what the runner serves from it."""

    runner: JobRunner
    first_attempt: int = 0
    """Number of the first attempt at a task in this run."""
    _datasets: dict[str, tuple[DatasetView, Providers]] = field(default_factory=dict)
    _artifacts: dict[str, Artifact] = field(default_factory=dict)
    """By the name of the dataset under which they are served."""
    _served_copies: list[Path] = field(default_factory=list)

    @property
    def job_id(self) -> uuid.UUID:
        """Id of the job."""
        return self.runner.job_id

    @property
    def directory(self) -> Path:
        """Directory of the job's files."""
        return self.runner.directory

    @property
    def scheduler(self) -> PeerId:
        """This scheduler."""
        return self.runner.host.endpoint.peer_id

    def reaches(self, dataset: str) -> bool:
        """Return whether a data node of an opened dataset is connected."""
        return self._datasets[dataset][1].is_reachable

    async def open_dataset(
        self, source: str | DatasetTable, *, timeout: float, manifest: str = MANIFEST
    ) -> DatasetView:
        """Find a dataset by its name, or fetch and serve the one of a table, and store its manifest in a file.

        Raises:
            JobFailedError: no usable data node announced it within `timeout` seconds, it cannot be fetched, or
                the job cannot use it.
        """
        path = self.directory / manifest
        if isinstance(source, DatasetTable) and source.dataset is None:
            dataset = await self._serve_dataset(source, path)
        else:
            name = source if isinstance(source, str) else str(source.dataset)
            dataset = await open_dataset(self.runner.host.endpoint, name, path, timeout=timeout)
        if faults := self.runner.job.dataset_faults(dataset):
            raise JobFailedError("\n".join(faults))
        providers = Providers(self.runner.host.endpoint, dataset.name, dataset.pinned, dataset.provider)
        self.runner.tasks.start_soon(providers.watch)
        self._datasets[dataset.name] = (dataset, providers)
        return dataset

    async def _serve_dataset(self, table: DatasetTable, manifest: Path) -> DatasetView:
        folder, name = table.directory, table.name_in(self.job_id)
        if folder is None:
            folder = served_copy(self.directory / "dataset")
            self._served_copies.append(folder)
            if table.repository is not None:
                await download_repository("dataset", table, folder)
            else:
                await self.runner.host.downloads.fetch("dataset", table, folder)
        try:
            dataset, files = await anyio.to_thread.run_sync(open_folder, folder, name, self.scheduler, manifest)
        except (DecodeError, ValueError, OSError) as error:
            raise JobFailedError(f"dataset.{table.source}: {table.shown} holds no dataset: {error}") from None
        self._artifacts[name] = Artifact(PeersReference((self.scheduler,), One()), tuple(map(PullSource, files)))
        return dataset

    async def fetch_output(self, output: StoredOutput, holder: PeerId, target: Path) -> int:
        """Pull an output of a task to `target`, a file or folder that does not exist; return its size in bytes.

        Raises:
            NetError: the holder cannot be reached, no longer has it, or has other content than it has announced; or it
                has more bytes than the disk has room for.
            OSError: it cannot be stored.
        """
        return await download_output(self.runner.host.endpoint, output, holder, target)

    async def prepare_artifact(
        self, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool = False
    ) -> Artifact:
        """Make a model, preprocessor or other files of a repository available to executors, from `copy` or their hub.

        Args:
            table: where it is.
            name: name under which it is served.
            copy: directory of the job's copy.
            unchanged: whether the job leaves the copy as it is; see `ArtifactCopies.open`.

        Raises:
            JobFailedError: it does not exist or has no usable files.
        """
        self._served_copies.append(served_copy(copy))
        host = self.runner.host
        copies = ArtifactCopies(self.job_id, self.scheduler, host.downloads, host.model_command)
        artifact = await copies.open(table, name, copy, unchanged=unchanged)
        self._artifacts[artifact_dataset(self.job_id, name)] = artifact
        return artifact

    async def presign(self, table: S3Table) -> str:
        """Return a URL of an object that anybody may read for 7 days, signed with this scheduler's keys; it is secret.

        Raises:
            JobFailedError: this scheduler has no keys.
        """
        return await presign(self.runner.host.access, table)

    def notify(self, name: str, message: object = None) -> None:
        """Deliver what background work observed to `Operator.on_message`, with no source."""
        self.runner.on_notice(name, message)

    # ------------------------------------------------------------------------------------------------- for the runner

    def remove_served_copies(self) -> None:
        """Remove the files that were only there to be served while the job ran."""
        for folder in self._served_copies:
            shutil.rmtree(folder, ignore_errors=True)

    def has_dataset(self, name: str) -> bool:
        """Return whether the job has opened a dataset."""
        return name in self._datasets

    def address(self, dataset: str, chosen: SliceToUse) -> AssignedSlice:
        """Return where a worker gets a slice."""
        found, providers = self._datasets[dataset]
        first, *others = providers.order(chosen.index)
        return AssignedSlice(
            data_provider=first,
            index=chosen.index,
            epoch=chosen.epoch,
            digest=found.digest(chosen.index),
            others=tuple(others) or None,
            format=found.format,
            first=chosen.first,
            end=chosen.end,
        )

    def locate(self, source: DatasetSource, failures: Collection[FailedHolder] = ()) -> ResourceLocation:
        """Return where slices of a dataset are."""
        if source.name not in self._datasets:
            return gone(f"the job does not use the dataset {source.name!r}")
        return locate_slices(*self._datasets[source.name], source, failures)

    def serves(self, dataset: str) -> bool:
        """Return whether an artifact is served under this name."""
        return dataset in self._artifacts

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return a file of an artifact, or a refusal."""
        return self._artifacts[request.dataset].resolve(request)
