"""Artifacts of a job: models and preprocessors that this scheduler serves to executors, and the result file."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec.structs import replace

from hypha_net.transfer import PullSource, describe
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, One, PeersReference, Reference, SliceAddress, UriReference
from hypha_proto.model_listing import CONFIG
from hypha_proto.transfer import PullRequest, Refusal
from hypha_proto.whole_directory import remove_tree, replace_directory, replace_file
from hypha_scheduler.errors import JobFailedError, files_unusable
from hypha_scheduler.jobs.config import (
    MODEL_COMMAND,
    ArtifactTable,
    ModelTable,
    PreprocessorTable,
    RepositoryTable,
    StartModelTable,
)
from hypha_scheduler.jobs.hub_download import RepositoryFiles, download, needs_token
from hypha_scheduler.jobs.model_creation import create_model
from hypha_scheduler.jobs.model_files import model_names, preprocessor_names
from hypha_scheduler.jobs.source_download import SourceDownloads

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """File that this scheduler serves."""

    name: str
    offered: PullSource


@dataclass(frozen=True, slots=True)
class Artifact:
    """Model or preprocessor: a reference for executors, and the files if this scheduler serves them."""

    reference: Reference
    files: tuple[ArtifactFile, ...] = ()
    origin: HuggingFaceReference | None = None
    """Repository and commit of `files`, without a token, if they are from a hub."""

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return the requested file, or a refusal."""
        if request.index >= len(self.files):
            return Refusal(reason=f"there are {len(self.files)} files, none with index {request.index}")
        return self.files[request.index].offered


def artifact_dataset(job_id: uuid.UUID, name: str) -> str:
    """Return the dataset name under which an artifact of a job is served."""
    return f"{job_id}/{name}"


async def open_preprocessor(
    table: PreprocessorTable | None,
    copy: Path,
    job_id: uuid.UUID,
    scheduler: PeerId,
    name: str = "preprocessor",
    *,
    unchanged: bool = False,
    downloads: SourceDownloads | None = None,
) -> Artifact | None:
    """Copy a preprocessor to `copy` and return it for serving as `name`; None if executors fetch it from the hub.

    Args:
        unchanged: as of `open_start_model`; there is a copy then also if executors fetch it from the hub.
        downloads: as of `open_start_model`.

    Raises:
        JobFailedError: the directory or repository does not exist or holds no preprocessor files.
    """
    if table is not None and table.remote_uri is not None:
        opened = partial(open_preprocessor, copy=copy, job_id=job_id, scheduler=scheduler, name=name)
        return await _open_remote("preprocessor", table, copy, opened, downloads, unchanged=unchanged)
    if table is not None and table.file is not None:
        local = table.model_copy(update={"path": table.file, "file": None})
        served = await open_preprocessor(local, copy, job_id, scheduler, name, unchanged=unchanged)
        return served if unchanged or table.serve or table.filenames else _shared_artifact(table.file)
    if table is None or (table.path is None and not unchanged and not await _is_served("preprocessor", table)):
        return None
    if unchanged:
        return await _open_unchanged("preprocessor", table, copy, job_id, scheduler, name)
    origin: HuggingFaceReference | None = None
    if table.path is not None:
        names = await anyio.to_thread.run_sync(_copy_preprocessor, table.path, table.filenames, copy)
    else:
        origin = await download_repository("preprocessor", table, copy)
        names = list(origin.filenames)
    return await _served_artifact(scheduler, artifact_dataset(job_id, name), copy, names, origin)


def _shared_artifact(folder: Path) -> Artifact:
    """Return a directory that executors read themselves, as schedulers and workers of one file system see it."""
    return Artifact(UriReference(value=folder.as_uri()))


async def _served_artifact(
    scheduler: PeerId, dataset: str, folder: Path, names: Sequence[str], origin: HuggingFaceReference | None = None
) -> Artifact:
    files = [ArtifactFile(name, PullSource(folder / name, (await describe(folder / name))[1])) for name in names]
    resource = SliceAddress(dataset=dataset, index=0)
    reference = PeersReference(peers=(scheduler,), strategy=One(), resource=resource, filenames=tuple(names))
    return Artifact(reference, tuple(files), None if origin is None else replace(origin, token=None))


async def open_repository(
    table: ArtifactTable, copy: Path, job_id: uuid.UUID, scheduler: PeerId, name: str
) -> Artifact:
    """Return where executors fetch files of a repository: from its hub, or from `copy`, which is served as `name`.

    Raises:
        JobFailedError: the repository does not exist or lacks one of the files.
    """
    if not await anyio.Path(copy).exists() and not await _is_served(name, table):
        return Artifact(hub_reference(table))
    return await _open_unchanged(name, table.model_copy(update={"serve": True}), copy, job_id, scheduler, name)


async def _is_served(key: str, table: ArtifactTable) -> bool:
    """Return whether this scheduler serves the files of a repository; see `ArtifactTable.serve`."""
    if table.serve is not None or table.token is not None:
        return table.serve is not False
    name = table.filenames[0] if table.filenames else CONFIG
    return await anyio.to_thread.run_sync(
        needs_token, key, str(table.repository), table.revision, name, abandon_on_cancel=True
    )


def hub_reference(table: ArtifactTable) -> HuggingFaceReference:
    """Return where executors fetch the files of a repository from its hub."""
    token = table.token.get_secret_value() if table.token else None
    return HuggingFaceReference(
        repository=str(table.repository), revision=table.revision, filenames=table.filenames, token=token
    )


def _copy_preprocessor(source: Path, wanted: tuple[str, ...], target: Path) -> list[str]:
    names = preprocessor_names(source, wanted)
    try:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise JobFailedError(f"preprocessor.path: {source} cannot be copied: {error}") from None
    return names


async def open_start_model(
    model: ModelTable,
    copy: Path,
    job_id: uuid.UUID,
    scheduler: PeerId,
    name: str = "model",
    *,
    unchanged: bool = False,
    command: Sequence[str] = MODEL_COMMAND,
    downloads: SourceDownloads | None = None,
) -> Artifact:
    """Copy a start model to `copy` and return where executors fetch it: from its hub, or served here as `name`.

    A model of a hub that is served has another copy in `served_copy`, since `copy` gets the job's updates. Files that
    an earlier run of the job has left in `copy` are overwritten.

    Args:
        unchanged: whether the job leaves `copy` as it is. It then appears whole or not at all, is served from there,
            and if it exists already, it is served whatever `model` says.
        command: creates a model from a configuration and a seed; see `model_creation`.
        downloads: fetches what `s3`, `uri` and `dht` name.

    Raises:
        JobFailedError: the directory or repository does not exist or holds no model, or none can be created.
    """
    if model.remote_uri is not None:
        opened = partial(open_start_model, copy=copy, job_id=job_id, scheduler=scheduler, name=name)
        return await _open_remote("model", model, copy, opened, downloads, unchanged=unchanged)
    if model.file is not None:
        local = model.model_copy(update={"path": model.file, "file": None})
        served = await open_start_model(local, copy, job_id, scheduler, name, unchanged=unchanged)
        return served if unchanged or model.serve or model.filenames else _shared_artifact(model.file)
    exists = unchanged and await anyio.Path(copy).exists()
    if not exists and isinstance(model, StartModelTable) and model.config is not None:
        model = await _create(model, served_copy(copy), command)
    if unchanged:
        return await _open_unchanged("model", model, copy, job_id, scheduler, name)
    source, origin = model.path, None
    if source is None:
        is_served = await _is_served("model", model)
        source = served_copy(copy) if is_served else copy
        origin = await download_repository("model", model, source)
        if not is_served:
            return Artifact(origin)
    wanted = model.filenames if origin is None else origin.filenames
    names = await anyio.to_thread.run_sync(_copy_model, source, wanted, copy)
    return await _served_artifact(scheduler, artifact_dataset(job_id, name), source, names, origin)


async def _open_remote(
    key: str,
    table: ArtifactTable,
    copy: Path,
    open_local: Callable[..., Awaitable[Artifact | None]],
    downloads: SourceDownloads | None,
    *,
    unchanged: bool,
) -> Artifact:
    """Return where executors fetch what `s3`, `uri` or `dht` names: from there, or from the copy that is served here.

    A job that keeps a copy as it is needs one in any case. One that exists already is served, since what the table
    names may have changed since.
    """
    assert downloads is not None, "the caller has given no downloads"
    if not unchanged and not table.serve:
        return Artifact(await downloads.reference(key, table))
    local = table.model_copy(update={"path": served_copy(copy), "s3": None, "uri": None, "dht": None})
    exists = unchanged and await anyio.Path(copy).exists()
    if not exists:
        await downloads.fetch(key, table, served_copy(copy))
    served = await open_local(local, unchanged=unchanged)
    assert served is not None  # files of a directory
    if unchanged:
        await anyio.to_thread.run_sync(remove_tree, served_copy(copy))
    return served if exists or table.serve else Artifact(await downloads.reference(key, table))


async def _create(model: StartModelTable, target: Path, command: Sequence[str]) -> StartModelTable:
    """Create a model in `target` and return the table of a job that starts from there."""
    await anyio.to_thread.run_sync(remove_tree, target)
    await create_model(model, target, command)
    return model.model_copy(update={"path": target, "config": None})


async def _open_unchanged(
    key: str, table: ArtifactTable, copy: Path, job_id: uuid.UUID, scheduler: PeerId, name: str
) -> Artifact:
    names, origin = await anyio.to_thread.run_sync(_take, key, table, copy, abandon_on_cancel=True)
    if origin is not None and not await _is_served(key, table):
        return Artifact(origin)
    return await _served_artifact(scheduler, artifact_dataset(job_id, name), copy, names, origin)


def _take(key: str, table: ArtifactTable, copy: Path) -> tuple[list[str], HuggingFaceReference | None]:
    """Copy or download a model or preprocessor, completely or not at all, unless there is a copy already.

    Returns:
        The names of its files, and where they were downloaded from.
    """
    origin: HuggingFaceReference | None = None
    copy_files = _copy_model if isinstance(table, ModelTable) else _copy_preprocessor
    try:
        if not copy.exists():
            with replace_directory(copy) as folder:
                if table.path is None:
                    origin = _download(key, table, folder)
                else:
                    copy_files(table.path, table.filenames, folder)
        return sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()), origin
    except OSError as error:
        raise JobFailedError(files_unusable(copy.parent, [error])) from None


def served_copy(copy: Path) -> Path:
    """Return the directory from which a start model of a hub is served while its job runs, beside the job's `copy`."""
    return copy.with_name(f".{copy.name}-served")


def _copy_model(source: Path, wanted: tuple[str, ...], target: Path) -> list[str]:
    names = model_names(source, wanted)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise JobFailedError(f"model.path: {source} cannot be copied: {error}") from None
    return names


async def download_repository(key: str, table: RepositoryTable, target: Path) -> HuggingFaceReference:
    """Download a repository's files to `target`, and return a reference to the same commit.

    Raises:
        JobFailedError: the repository does not exist, or lacks one of the files.
    """
    return await anyio.to_thread.run_sync(_download, key, table, target, abandon_on_cancel=True)


def _download(key: str, table: RepositoryTable, target: Path) -> HuggingFaceReference:
    token = table.token.get_secret_value() if table.token else None
    wanted = table.filenames if isinstance(table, ArtifactTable) else ()
    source = RepositoryFiles(key, str(table.repository), table.revision, token, wanted, table.content)
    commit, names = download(source, target)
    return HuggingFaceReference(repository=source.repository, revision=commit, filenames=names, token=token)


async def add_update(model: Path, update: Path) -> None:
    """Add an update file to the model in a directory; an update that does not fit leaves the model unchanged.

    Raises:
        JobFailedError: the update does not match the model, or a file cannot be used.
    """
    from hypha_proto.update_file import apply_update_to_dir  # imported late: numpy takes 0.1 s

    with translate_update_errors(model, update):
        await anyio.to_thread.run_sync(partial(apply_update_to_dir, model, update))


@contextmanager
def translate_update_errors(model: Path, update: Path) -> Iterator[None]:
    """Translate errors while an update file is added to the model in a directory.

    Raises:
        JobFailedError: the update does not match the model, or a file cannot be used.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error = OSError(error.errno, error.strerror, str(model))
        raise JobFailedError(files_unusable(model.parent, [error])) from None
    except TensorFileError as error:
        raise JobFailedError(f"update {update.name} cannot be added to the model: {error}") from None


def write_result(path: Path, result: Mapping[str, object]) -> None:
    """Write ``result.json`` atomically and sync it to disk.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    try:
        replace_file(path, f"{json.dumps(result, indent=2)}\n".encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_to_disk(*paths: Path) -> None:
    """Sync files and their directory entries to disk."""
    for path in (*paths, *sorted({path.parent for path in paths})):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
