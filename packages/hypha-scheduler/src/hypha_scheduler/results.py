"""Model files of a job: the start model and preprocessor served to workers, and the trained model.

The scheduler keeps a copy of the start model in the job's directory and adds to it every outer update that the
parameter server pushes; that copy is the result. Called by `training`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from hypha_net.transfer import PullSource, describe
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, One, PeersReference, Reference, SliceAddress
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError, files_unusable
from hypha_scheduler.job_config import ModelTable, PreprocessorTable
from hypha_scheduler.model_files import MODEL_PATTERNS, model_names, preprocessor_names

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """File that this scheduler serves."""

    name: str
    offered: PullSource


@dataclass(frozen=True, slots=True)
class StartModel:
    """Start model or preprocessor: a reference for executors, and the files if this scheduler serves them."""

    reference: Reference
    files: tuple[ModelFile, ...] = ()

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return the requested file, or a refusal."""
        if request.index >= len(self.files):
            return Refusal(reason=f"the model has {len(self.files)} files, none with index {request.index}")
        return self.files[request.index].offered


def model_dataset(job_id: uuid.UUID) -> str:
    """Return the dataset name under which a job's start model is served."""
    return f"{job_id}/model"


def preprocessor_dataset(job_id: uuid.UUID) -> str:
    """Return the dataset name under which a job's preprocessor is served."""
    return f"{job_id}/preprocessor"


async def open_preprocessor(
    table: PreprocessorTable | None, copy: Path, job_id: uuid.UUID, scheduler: PeerId
) -> StartModel | None:
    """Copy a local preprocessor to `copy` and return it for serving; None if executors fetch it from the hub.

    Raises:
        JobFailedError: the directory does not exist or holds no preprocessor files.
    """
    if table is None or table.path is None:
        return None
    names = await anyio.to_thread.run_sync(_copy_preprocessor, table.path, table.filenames, copy)
    files = [ModelFile(name, PullSource(copy / name, (await describe(copy / name))[1])) for name in names]
    reference = PeersReference(
        peers=(scheduler,), strategy=One(), resource=SliceAddress(dataset=preprocessor_dataset(job_id), index=0),
        filenames=tuple(names),
    )  # fmt: skip
    return StartModel(reference, tuple(files))


def _copy_preprocessor(source: Path, wanted: tuple[str, ...], target: Path) -> list[str]:
    names = preprocessor_names(source, wanted)
    try:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise JobFailedError(f"preprocessor.path: {source} cannot be copied: {error}") from None
    return names


async def open_start_model(model: ModelTable, copy: Path, job_id: uuid.UUID, scheduler: PeerId) -> StartModel:
    """Copy the start model to `copy` and return where executors fetch it.

    Raises:
        JobFailedError: the directory or repository does not exist or holds no model.
    """
    if model.path is None:
        return StartModel(await anyio.to_thread.run_sync(_download, model, copy, abandon_on_cancel=True))
    names = await anyio.to_thread.run_sync(_copy_model, model.path, model.filenames, copy)
    files = []
    for name in names:
        path = model.path / name
        files.append(ModelFile(name, PullSource(path, (await describe(path))[1])))
    reference = PeersReference(
        peers=(scheduler,), strategy=One(), resource=SliceAddress(dataset=model_dataset(job_id), index=0),
        filenames=tuple(names),
    )  # fmt: skip
    return StartModel(reference, tuple(files))


def _copy_model(source: Path, wanted: tuple[str, ...], target: Path) -> list[str]:
    names = model_names(source, wanted)
    try:
        target.mkdir(parents=True)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise JobFailedError(f"model.path: {source} cannot be copied: {error}") from None
    return names


def _download(model: ModelTable, target: Path) -> HuggingFaceReference:
    """Download a repository's files and return a reference to the same commit for the workers."""
    from huggingface_hub import HfApi, snapshot_download  # imported late: takes 0.5 s
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository = str(model.repository)
    token = model.token.get_secret_value() if model.token else None
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        commit = HfApi(endpoint=endpoint, token=token).model_info(repository, revision=model.revision).sha
        snapshot_download(
            repository, revision=commit, token=token, local_dir=target, endpoint=endpoint,
            allow_patterns=list(model.filenames or MODEL_PATTERNS),
            max_workers=1,  # threads share one client, which huggingface_hub closes for all of them when one fails
        )  # fmt: skip
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise JobFailedError(f"model.repository: {repository} cannot be fetched: {error}") from None
    except Exception as error:  # connection errors of an HTTP library that depends on the version of huggingface_hub
        raise JobFailedError(f"model.repository: {repository} cannot be fetched: {error!r:.400}") from error
    shutil.rmtree(target / ".cache", ignore_errors=True)
    names = model.filenames or tuple(sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()))
    return HuggingFaceReference(repository=repository, revision=commit, filenames=names, token=token)


@dataclass(slots=True)
class ResultModel:
    """The job's copy of the model, to which outer updates are added."""

    directory: Path
    """Directory of the model's files."""
    every: int = 1
    """Number of received updates after which they are added to the files."""
    round: int = 0
    """Last round whose outer update was received."""
    update_bytes: int = 0
    """Size of the last outer update in bytes."""
    _pending: list[Path] = field(default_factory=list)
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    async def apply_update(self, update: Path, round_number: int) -> None:
        """Take the outer update of the next round and add it to the model; the file is deleted afterwards.

        Raises:
            JobFailedError: the update does not match the model.
        """
        async with self._lock:
            if round_number != self.round + 1:
                await anyio.Path(update).unlink(missing_ok=True)
                _log.info("ignoring the outer update of round %d, expected round %d", round_number, self.round + 1)
                return
            self.update_bytes = (await anyio.Path(update).stat()).st_size
            self._pending.append(update)
            if len(self._pending) >= self.every:
                await self._add_pending()
            self.round = round_number

    def largest_update(self) -> int:
        """Return the size limit of an outer update in bytes: float32 for a model stored in 8 bits or more a number."""
        return 4 * sum(path.stat().st_size for path in self.directory.glob("*.safetensors")) + (16 << 20)

    def lacks_room(self, size: int) -> str | None:
        """Return why an outer update of `size` bytes cannot be stored, or None if there is room for it."""
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            return files_unusable(self.directory.parent, [error])
        if size <= free:
            return None
        full = OSError(errno.ENOSPC, f"an outer update has {size} bytes, {free} are free", str(self.directory.parent))
        return files_unusable(self.directory.parent, [full])

    async def finish(self) -> None:
        """Add the remaining updates and sync the model to disk.

        Raises:
            JobFailedError: an update does not match the model.
            OSError: the files cannot be synced.
        """
        async with self._lock:
            await self._add_pending()
            await anyio.to_thread.run_sync(_fsync, *(p for p in self.directory.rglob("*") if p.is_file()))

    async def _add_pending(self) -> None:
        from hypha_proto.update_file import apply_update_to_dir  # imported late: numpy takes 0.1 s

        for update in list(self._pending):
            try:
                await anyio.to_thread.run_sync(partial(apply_update_to_dir, self.directory, update))
            except OSError as error:
                if error.filename is None:
                    error = OSError(error.errno, error.strerror, str(self.directory))
                raise JobFailedError(files_unusable(self.directory.parent, [error])) from None
            except TensorFileError as error:
                raise JobFailedError(f"outer update {update.name} cannot be added to the model: {error}") from None
            update.unlink()
            self._pending.remove(update)


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Write ``result.json`` atomically and sync it to disk.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(result, indent=2) + "\n")
        _fsync(part)
        os.replace(part, path)
        _fsync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _fsync(*paths: Path) -> None:
    """Sync files and their directory entries to disk."""
    for path in (*paths, *sorted({path.parent for path in paths})):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
