"""Brings files into the work directory of a task from wherever they are: before its executor starts, and when it asks.

Results and datasets are located by asking the scheduler; whatever fails with a holder is reported there, and it names
another way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

from hypha_net import instrumentation, retries, rpc
from hypha_net.connectors.s3_source import s3_uri
from hypha_net.endpoint import Endpoint
from hypha_net.errors import (
    ContentMismatchError,
    NetError,
    TransferRefusedError,
    first_leaf_error,
)
from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import FetchedFile
from hypha_proto.ids import PeerId, find_path_fault
from hypha_proto.job_spec import HuggingFaceReference, PeersReference, Reference, SliceAddress, UriReference
from hypha_proto.task_resources import (
    LOCATE_RESOURCE,
    AwaitPush,
    FailedHolder,
    LocatedFile,
    LocateResource,
    ResourceLocation,
)
from hypha_proto.tasks import RESOURCES, PeersSource, TaskResource
from hypha_proto.texts import shorten
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.content_holders import check_sha256
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.local_files import copy_local_files
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import (
    BridgeError,
    ExecutionError,
    WorkReturnedError,
    bad_request,
    disk_fault_of,
)
from hypha_worker.task_files import TaskFiles, safe_name
from hypha_worker.task_storage import TaskStorage
from hypha_worker.tasks.output_files import copy_file
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.resource_pushes import PushStalledError, ResourcePushes

_log = logging.getLogger(__name__)

MAX_FETCHES: Final = 4
"""Files of a task's resources that are fetched at once."""
MAX_RETRY: Final = 30.0
"""Longest pause in seconds before the scheduler is asked again for a resource that does not exist yet."""
MIN_RETRY: Final = 0.05
_FETCHED: Final = instrumentation.Counter("hypha.worker.resources", "{resource}", "Resources of tasks, by outcome.")
_BYTES: Final = instrumentation.Counter("hypha.worker.resource.io", "By", "Bytes of fetched resources.")


class ResourceError(ExecutionError):
    """A resource cannot be fetched.

    Attributes:
        resource: its name.
    """

    def __init__(self, resource: str, reason: str) -> None:
        super().__init__(f"resource {resource}: {reason}")
        self.resource = resource


class _HolderFailures(Exception):
    def __init__(self, failures: Sequence[FailedHolder]) -> None:
        super().__init__("; ".join(f"{failure.peer}: {failure.reason}" for failure in failures))
        self.failures = tuple(failures)


@dataclass(frozen=True, slots=True)
class ResourceFetcher:
    """Fetches what one attempt at a task needs: its resources, and references of its executor."""

    contact: SchedulerContact
    attempt: AttemptId
    storage: TaskStorage
    access: AccessPolicy
    store: OutputStore
    resource_pushes: ResourcePushes
    _places: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(MAX_FETCHES))

    @property
    def endpoint(self) -> Endpoint:
        """This worker's endpoint."""
        return self.contact.endpoint

    @property
    def files(self) -> PeerFiles:
        """What transfers files from and to peers for this task."""
        return PeerFiles(self.endpoint, self.storage)

    @property
    def downloads(self) -> Downloads:
        """What downloads from other places."""
        return Downloads(self.access, self.storage, self.files)

    async def fetch_all(self, resources: Sequence[TaskResource]) -> dict[str, str]:
        """Fetch all resources at once; return the path of each, relative to the work directory.

        Slices, which the executor fetches one by one, are left out.

        Raises:
            ResourceError: one cannot be fetched.
            WorkReturnedError: this worker's disk is full or fails.
        """
        resources = [resource for resource in resources if resource.slices is None]
        if not resources:
            return {}
        async with anyio.create_task_group() as tasks:
            for resource in resources:
                tasks.start_soon(self._fetch, resource)
        return {resource.name: f"{RESOURCES}/{resource.name}" for resource in resources}

    async def fetch(
        self, reference: Reference, folder: PurePosixPath, slice_name: str | None = None
    ) -> list[FetchedFile]:
        """Fetch what a reference to a hub, a URI or peers names into a folder.

        Args:
            reference: names it; the secrets are filled in.
            folder: of the work directory.
            slice_name: name of a peers' file for which the reference has none; by default one that tells the slice.

        Raises:
            BridgeError: it cannot be fetched.
            StorageExceededError: it would exceed the storage.
            OSError: it cannot be written.
        """
        if isinstance(reference, HuggingFaceReference):
            return await self.downloads.from_hub(reference, folder)
        if isinstance(reference, UriReference):
            return await self.downloads.all_from_uri(reference.value, folder)
        assert isinstance(reference, PeersReference)
        address = reference.resource
        if address is None:
            raise bad_request('resource: none is given: add {"dataset": …, "index": …}, which the peers serve')
        default = slice_name or f"{safe_name(address.dataset)}-{address.index}.safetensors"
        targets = [folder / name for name in reference.filenames or (default,)]
        return [
            await self._pull(reference.peers, SliceAddress(dataset=address.dataset, index=index), target)
            for index, target in enumerate(targets, address.index)
        ]

    async def _pull(self, peers: Sequence[PeerId], address: SliceAddress, target: PurePosixPath) -> FetchedFile:
        self.storage.files.make_folder(str(target.parent))
        return await self.files.fetch(peers, WantedFile(address), target)

    async def _fetch(self, resource: TaskResource) -> None:
        outcome = "failed"
        try:
            with instrumentation.span("fetch resource", {"hypha.resource": resource.name}):
                await self._fetch_from_source(resource, PurePosixPath(RESOURCES, resource.name))
            outcome = "fetched"
        except (BridgeError, NetError, OSError) as error:
            if (fault := disk_fault_of(error, self.storage.files.work_dir)) is not None:
                raise _returned(resource, fault) from error
            raise ResourceError(resource.name, _without_token(str(error), resource)) from error
        finally:
            _FETCHED.add(1, {"hypha.outcome": outcome})

    async def _fetch_from_source(self, resource: TaskResource, target: PurePosixPath) -> None:
        if resource.result is not None or resource.dataset is not None:
            await self._fetch_located(resource, target)
        elif resource.peers is not None:
            await self._fetch_from_peers(resource.peers, target)
        elif resource.huggingface is not None:
            async with self._places:
                self.storage.files.make_folder(str(target))
                self._count(await self.fetch(resource.huggingface, target))
        elif resource.file is not None:
            async with self._places:
                await copy_local_files(resource.file.path, target, self.access, self.storage)
        else:
            async with self._places:
                self._count([await self._download(resource, target)])

    async def _download(self, resource: TaskResource, target: PurePosixPath) -> FetchedFile:
        if resource.s3 is not None:
            uri = s3_uri(resource.s3.bucket, resource.s3.key)
        elif resource.dht is not None:
            uri = f"sha256:{check_sha256(resource.dht.sha256)}"
        else:
            assert resource.uri is not None
            uri = resource.uri.value
        return await self.downloads.from_uri(uri, target.parent, target.name)

    def _count(self, files: Sequence[FetchedFile]) -> None:
        self._count_bytes(sum(file.size for file in files))

    def _count_bytes(self, size: int) -> None:
        self.storage.traffic.received += size
        _BYTES.add(size)

    async def _fetch_from_peers(self, source: PeersSource, target: PurePosixPath) -> None:
        """Pull one file to `target`, or named ones to a folder there."""
        targets = [target] if source.filenames is None else [target / name for name in source.filenames]
        for index, place in enumerate(targets, source.index):
            async with self._places:
                address = SliceAddress(dataset=source.dataset, index=index)
                self._count([await self._pull(source.peers, address, place)])

    # ---------------------------------------------------------------------------------------------- results, datasets

    async def _fetch_located(self, resource: TaskResource, target: PurePosixPath) -> None:
        """Ask the scheduler where a resource is until its files are here; first try where it is known to be.

        Raises:
            ResourceError: there is none, or the answer cannot be used.
        """
        name, known = resource.name, resource.location
        staged = _StagedFiles(self.storage.files.staging_folder() / f"{RESOURCES}-{name}", resource.dataset is not None)
        failures: tuple[FailedHolder, ...] = ()
        rounds = 0
        while True:
            location = await self._locate(name, failures) if known is None else ResourceLocation(pull=known)
            known, failures = None, ()
            if location.not_yet is not None:
                await anyio.sleep(min(MAX_RETRY, max(MIN_RETRY, location.not_yet.retry_ms / 1000)))
                continue
            try:
                await self._bring(name, location, staged)
                break
            except _HolderFailures as error:
                failures = error.failures
                _log.warning("resource %s of task %s: %s; asking the scheduler again", name, self.attempt.task, error)
            await retries.LOCATION.wait(rounds)
            rounds += 1
        await self.storage.run(staged.publish, self.storage.files, target)

    async def _locate(self, name: str, failures: tuple[FailedHolder, ...]) -> ResourceLocation:
        """Ask until the scheduler answers: the task ends with its lease."""
        question = LocateResource(attempt=self.attempt, resource=name, failures=failures)
        with self.resource_pushes.locating(self.attempt.job_id):  # also in the pauses: the answer may have been lost
            return await retries.LOCATION.retry_unless_refused(
                f"asking where resource {name} of task {self.attempt.task} is",
                lambda: rpc.call(self.endpoint, self.contact.scheduler, LOCATE_RESOURCE, question, timeout=30.0),
            )

    async def _bring(self, name: str, location: ResourceLocation, staged: _StagedFiles) -> None:
        if location.gone is not None:
            raise ResourceError(name, f"there is none: {location.gone.reason}")
        announced = location.pull or location.pushed
        if announced is None:
            raise ResourceError(name, "the scheduler's answer says nothing that this worker knows")
        _check_files(name, announced.files)
        staged.expect(announced.files)
        if isinstance(announced, AwaitPush):
            await self._await_push(announced, staged)
        elif not all(file.peers for file in announced.files):
            raise ResourceError(name, "the scheduler names nobody who has one of its files")
        else:
            await self._pull_files(announced.files, staged)

    async def _await_push(self, announced: AwaitPush, staged: _StagedFiles) -> None:
        staged.complete.clear()
        with self.storage.files.staged() as folder:
            folder.mkdir(mode=0o700)
            with self.resource_pushes.expecting(announced, self.attempt.job_id, folder, self.storage) as delivery:
                try:
                    await delivery.wait()
                except PushStalledError as error:
                    raise _HolderFailures([FailedHolder(peer, str(error)) for peer in announced.senders]) from error
            for index in range(len(announced.files)):
                os.replace(folder / str(index), staged.path(index))
                staged.complete.add(index)

    async def _pull_files(self, files: Sequence[LocatedFile], staged: _StagedFiles) -> None:
        """Pull what is not here yet, some files at once; try all of them before a failure is reported."""
        failures: dict[PeerId, FailedHolder] = {}

        async def pull(index: int) -> None:
            async with self._places:
                found = await self._pull_file(files[index], staged.path(index), staged.is_cached)
            if not found:
                staged.complete.add(index)
            for failure in found:
                failures.setdefault(failure.peer, failure)

        missing = [index for index in range(len(files)) if index not in staged.complete]
        rest = iter(missing)

        async def pull_some() -> None:
            for index in rest:
                if failures:
                    return
                await pull(index)

        try:
            async with anyio.create_task_group() as tasks:
                for _ in missing[:MAX_FETCHES]:
                    tasks.start_soon(pull_some)
        except ExceptionGroup as errors:
            raise first_leaf_error(errors) from None
        if failures:
            raise _HolderFailures(list(failures.values()))

    async def _pull_file(self, file: LocatedFile, target: Path, is_cached: bool) -> list[FailedHolder]:
        """Pull one file, or copy it if this worker itself has it; return what failed with each of its holders."""
        if self.endpoint.peer_id in file.peers:
            return await self._copy_own(file, target)
        address = SliceAddress(dataset=file.dataset, index=file.index)
        wanted = WantedFile(address, file.digest, is_cached=is_cached, policy=retries.HOLDER)
        found = await self.files.pull_once(file.peers, wanted, target)
        if not isinstance(found, dict):
            self._count_bytes(found[0].size)
            return []
        return [FailedHolder(peer, shorten(str(error), 400), _is_permanent(error)) for peer, error in found.items()]

    async def _copy_own(self, file: LocatedFile, target: Path) -> list[FailedHolder]:
        held = self.store.find(file.dataset, file.index)
        if held is None or file.digest not in (None, held.output.files[file.index].digest):
            return [FailedHolder(self.endpoint.peer_id, "this worker itself has no such file", True)]
        await self.storage.run(copy_file, held.file_path(file.index), target, self.storage)
        return []


@dataclass(slots=True)
class _StagedFiles:
    """The files of a located resource, each under its index, until all are there."""

    place: Path
    """Path of a folder that is made when they are to be parted by their paths; their own paths begin with it."""
    is_cached: bool = False
    """Whether the worker's cache keeps them: datasets are used again, results of tasks hardly ever."""
    files: Sequence[LocatedFile] = ()
    complete: set[int] = field(default_factory=set)
    """Indices of files that are here."""

    def path(self, index: int) -> Path:
        """Return the path of a file."""
        return self.place.with_name(f"{self.place.name}-{index}")

    def expect(self, files: Sequence[LocatedFile]) -> None:
        """Expect these files; keep those that are here and are known to be the same."""
        before = self.files
        self.files = files
        self.complete = {
            index
            for index in self.complete
            if index < len(files) and (digest := files[index].digest) is not None and digest == before[index].digest
        }
        for index in set(range(len(before))) - self.complete:
            self.path(index).unlink(missing_ok=True)

    def publish(self, task_files: TaskFiles, target: PurePosixPath) -> None:
        """Move the files to their places in the task's folder, all at once."""
        found = self.path(0)
        if len(self.files) != 1 or self.files[0].path:
            found = self.place
            found.mkdir(mode=0o700)
            for index, file in enumerate(self.files):
                place = found / file.path
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.replace(self.path(index), place)
        task_files.publish(found, target)


def _check_files(name: str, files: Sequence[LocatedFile]) -> None:
    """Check where a scheduler wants files to be.

    Raises:
        ResourceError: a path leads out of the resource, or two files overlap.
    """
    paths = [file.path for file in files]
    if paths != [""] and (fault := find_path_fault(paths)) is not None:
        raise ResourceError(name, f"the scheduler names files at {fault}")


def _is_permanent(error: NetError) -> bool:
    return isinstance(error, TransferRefusedError | ContentMismatchError)


def _returned(resource: TaskResource, reason: str) -> WorkReturnedError:
    """Return the error of a resource that this worker's disk cannot take."""
    others = ("name", "location")
    kinds = (key for key in resource.__struct_fields__ if key not in others and getattr(resource, key) is not None)
    return WorkReturnedError(f"resource {resource.name} ({next(kinds)}): {reason}")


def _without_token(text: str, resource: TaskResource) -> str:
    token = resource.huggingface.token if resource.huggingface is not None else None
    return text.replace(token, "[token]") if token else text
