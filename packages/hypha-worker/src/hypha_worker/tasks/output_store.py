"""The outputs of tasks that this worker holds for others, from the end of their task until they are released.

Nothing outlives the worker's process.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import anyio
import anyio.to_thread

from hypha_net.transfer import PullSource
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.tasks import MAX_OUTPUT_FILES, StoredOutput
from hypha_proto.texts import quote
from hypha_proto.transfer import PullRequest, Refusal
from hypha_worker.openat import IrregularFileError, LinkInPathError
from hypha_worker.task_files import TaskFiles
from hypha_worker.task_storage import TaskStorage
from hypha_worker.tasks.output_files import (
    OutputError,
    copy_file,
    describe_files,
    irregular_output,
    list_files,
    remove_output,
)

_log = logging.getLogger(__name__)

OUTPUT_LIFE: Final = 3600.0
"""Seconds after the last renewal of its lease for which an output is held."""


@dataclass(frozen=True, slots=True)
class OutputOwner:
    """Whose outputs they are."""

    scheduler: PeerId
    attempt: AttemptId
    lease: uuid.UUID


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """One stored output."""

    owner: OutputOwner
    output: StoredOutput
    path: Path
    """The file or folder."""
    size: int
    """Bytes of all its files."""

    def file_path(self, index: int) -> Path:
        """Return the path of one of its files."""
        inside = self.output.files[index].path
        return self.path / inside if inside else self.path


class OutputStore:
    """All outputs that a worker holds."""

    def __init__(self, folder: Path) -> None:
        """Prepare; `folder` is created with the first output."""
        self.folder = folder
        self._held: dict[str, HeldOutput] = {}
        self._renewed: dict[uuid.UUID, float] = {}
        """When each lease with outputs was last renewed, on the local clock."""
        self.on_removed: Callable[[], None] = lambda: None
        """Called when outputs were removed."""

    @property
    def held(self) -> tuple[HeldOutput, ...]:
        """Every output."""
        return tuple(self._held.values())

    async def store(
        self, owner: OutputOwner, name: str, path: str, storage: TaskStorage, now: float, *, copy: bool
    ) -> StoredOutput:
        """Take an output of a task; return it with the digests of its files.

        Args:
            owner: whose it is.
            name: its name.
            path: its path in the task's work directory.
            storage: of the task.
            now: time of the local clock.
            copy: whether to leave the original in its place, for an executor that still runs.

        Raises:
            OutputError: it is not what an output may be, or too large.
            StorageExceededError: a copy would exceed the task's storage.
            OSError: it cannot be stored.
        """
        dataset = f"output-{secrets.token_hex(16)}"
        target = self.folder / dataset
        try:
            output = await storage.run(_take, name, dataset, path, target, storage, copy)
        except BaseException:
            remove_output(target)
            storage.release(target)
            raise
        self._held[dataset] = HeldOutput(owner, output, target, output.size)
        self._renewed.setdefault(owner.lease, now)
        return output

    def find(self, dataset: str, index: int) -> HeldOutput | None:
        """Return the output that has a file of this index, or None."""
        held = self._held.get(dataset)
        return held if held is not None and index < len(held.output.files) else None

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return a file that a peer asks for, or a refusal, which does not tell whether there is such an output."""
        held = None if request.name is not None else self.find(request.dataset, request.index)
        if held is None:
            return Refusal(reason=f"this worker has no file {request.index} of {quote(request.dataset)}")
        return PullSource(held.file_path(request.index), held.output.files[request.index].digest)

    def lease_bytes(self, lease: uuid.UUID) -> int:
        """Return the bytes of all outputs that tasks on a lease have made."""
        return sum(held.size for held in self._held.values() if held.owner.lease == lease)

    def bytes_without_lease(self, leases: Collection[uuid.UUID]) -> int:
        """Return the bytes of all outputs whose lease is none of `leases`: those that are held."""
        return sum(held.size for held in self._held.values() if held.owner.lease not in leases)

    def renew(self, lease: uuid.UUID, now: float) -> None:
        """Hold the outputs of a lease for `OUTPUT_LIFE` from now on."""
        if lease in self._renewed:
            self._renewed[lease] = now

    def expired(self, now: float) -> list[HeldOutput]:
        """Return the outputs whose lease was not renewed for `OUTPUT_LIFE`."""
        late = {lease for lease, renewed in self._renewed.items() if now >= renewed + OUTPUT_LIFE}
        return [held for held in self._held.values() if held.owner.lease in late]

    def find_owned(self, scheduler: PeerId, job_id: uuid.UUID, datasets: Iterable[str]) -> list[HeldOutput]:
        """Return the outputs of a scheduler's job; only those named, if any is."""
        wanted = frozenset(datasets)
        owned = [held for held in self._held.values() if held.owner.scheduler == scheduler]
        mine = [held for held in owned if held.owner.attempt.job_id == job_id]
        return [held for held in mine if not wanted or held.output.dataset in wanted]

    async def remove(self, outputs: Iterable[HeldOutput]) -> int:
        """Remove outputs; return how many of them were still held. They are offered no more at once."""
        removed = [held for held in outputs if self._held.pop(held.output.dataset, None) is not None]
        if removed:
            leases = {held.owner.lease for held in self._held.values()}
            self._renewed = {lease: renewed for lease, renewed in self._renewed.items() if lease in leases}
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove_all, [held.path for held in removed])
            self.on_removed()
        return len(removed)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        remove_output(path)


def _take(name: str, dataset: str, path: str, target: Path, storage: TaskStorage, copy: bool) -> StoredOutput:
    files = list_files(name, storage.files, path, MAX_OUTPUT_FILES)
    size = sum(size for _, size in files)
    if size > storage.limit:
        raise OutputError(
            f"output {name} has {size} bytes, and the task's storage has {storage.limit}: request more storage"
        )
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if copy:
        storage.reserve(target, size)  # for as long as the task runs: the store is outside its work directory
    names = [file for file, _ in files]
    if names != [""]:
        target.mkdir(mode=0o700)
    for file in names:
        _take_file(name, PurePosixPath(path, file), target / file if file else target, storage.files, copy)
    return StoredOutput(name=name, dataset=dataset, files=describe_files(target, names))


def _take_file(name: str, path: PurePosixPath, target: Path, files: TaskFiles, copy: bool) -> None:
    """Copy or move one file into a folder that this worker alone has made; it was regular a moment ago."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if copy:
            with files.open_regular(path) as file:
                copy_file(file, target, storage=None)
        else:
            files.take(path, target)
    except IrregularFileError as error:
        raise irregular_output(name, str(path), error.kind) from None
    except (FileNotFoundError, NotADirectoryError, LinkInPathError):
        raise OutputError(f"output {name}: {str(path)!r} was moved while it was stored") from None
