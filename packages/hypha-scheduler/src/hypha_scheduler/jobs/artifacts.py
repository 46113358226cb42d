"""Artifacts of a job: models and preprocessors that this scheduler serves to executors, and the result file."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from hypha_proto.whole_directory import remove_tree, replace_directory, replace_file, sync
from hypha_scheduler.errors import JobFailedError, files_unusable
from hypha_scheduler.jobs.config import (
    MODEL_COMMAND,
    ArtifactTable,
    RepositoryTable,
    StartModelTable,
)
from hypha_scheduler.jobs.hub_download import RepositoryFiles, download, needs_token
from hypha_scheduler.jobs.model_creation import create_model
from hypha_scheduler.jobs.model_files import file_names
from hypha_scheduler.jobs.source_download import SourceDownloads

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Artifact:
    """Model or preprocessor: a reference for executors, and the files if this scheduler serves them."""

    reference: Reference
    files: tuple[PullSource, ...] = ()
    """Their names are those of the reference."""
    origin: HuggingFaceReference | None = None
    """Repository and commit of `files`, without a token, if they are from a hub."""

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return the requested file, or a refusal."""
        if request.index >= len(self.files):
            return Refusal(reason=f"there are {len(self.files)} files, none with index {request.index}")
        return self.files[request.index]


def artifact_dataset(job_id: uuid.UUID, name: str) -> str:
    """Return the dataset name under which an artifact of a job is served."""
    return f"{job_id}/{name}"


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


@dataclass(frozen=True, slots=True)
class ArtifactCopies:
    """Makes models, preprocessors and other files of repositories available to the executors of a job."""

    job_id: uuid.UUID
    scheduler: PeerId
    downloads: SourceDownloads | None = None
    """Fetches what `s3`, `uri` and `dht` name; without it, none may be named."""
    command: Sequence[str] = MODEL_COMMAND
    """Creates a model from a configuration and a seed; see `model_creation`."""

    async def open(self, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool = False) -> Artifact:
        """Return where executors fetch what a table names: from its hub or URL, or served here as `name`.

        A model is copied to `copy`, which gets the job's updates: what is served is another copy of a hub's files, in
        `served_copy`, or the directory that the table names. A preprocessor is copied if it is served. Files that an
        earlier run of the job has left in `copy` are overwritten.

        Args:
            table: says where it is.
            name: name under which it is served.
            copy: directory of the job's copy.
            unchanged: whether the job leaves `copy` as it is, as it always does with a plain `ArtifactTable`. It then
                appears whole or not at all, is served from there, and if it exists already, whatever `table` says.

        Raises:
            JobFailedError: the directory or repository does not exist or lacks files, or no model can be created.
        """
        key = name if table.content == "files" else table.content
        if table.remote_uri is not None:
            return await self._open_remote(key, table, name, copy, unchanged=unchanged)
        if table.file is not None:
            local = table.model_copy(update={"path": table.file, "file": None})
            served = await self.open(local, name, copy, unchanged=unchanged)
            # executors read a shared file system themselves
            is_served = unchanged or table.serve or table.filenames
            return served if is_served else Artifact(UriReference(value=table.file.as_uri()))
        exists = await anyio.Path(copy).exists()
        if isinstance(table, StartModelTable) and table.config is not None and not (unchanged and exists):
            table = await _create(table, served_copy(copy), self.command)
        if table.content == "files":
            if not exists and not await _is_served(key, table):
                return Artifact(hub_reference(table))
            table = table.model_copy(update={"serve": True})
        if unchanged or table.content == "files":
            return await self._open_unchanged(key, table, name, copy)
        return await self._open_copied(key, table, name, copy)

    async def _open_remote(self, key: str, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool) -> Artifact:
        """Return where executors fetch what `s3`, `uri` or `dht` names: from there, or from the copy served here.

        A job that keeps a copy as it is needs one in any case. One that exists already is served, since what the table
        names may have changed since.
        """
        assert self.downloads is not None, "the caller has given no downloads"
        if not unchanged and not table.serve:
            return Artifact(await self.downloads.reference(key, table))
        local = table.model_copy(update={"path": served_copy(copy), "s3": None, "uri": None, "dht": None})
        exists = unchanged and await anyio.Path(copy).exists()
        if not exists:
            await self.downloads.fetch(key, table, served_copy(copy))
        served = await self.open(local, name, copy, unchanged=unchanged)
        if unchanged:
            await anyio.to_thread.run_sync(remove_tree, served_copy(copy))
        return served if exists or table.serve else Artifact(await self.downloads.reference(key, table))

    async def _open_unchanged(self, key: str, table: ArtifactTable, name: str, copy: Path) -> Artifact:
        names, origin = await anyio.to_thread.run_sync(_take, key, table, copy, abandon_on_cancel=True)
        if origin is not None and not await _is_served(key, table):
            return Artifact(origin)
        return await self._serve(name, copy, names, origin)

    async def _open_copied(self, key: str, table: ArtifactTable, name: str, copy: Path) -> Artifact:
        gets_updates = table.content == "model"
        source, wanted, origin = table.path, table.filenames, None
        if source is None:
            is_served = await _is_served(key, table)
            if not is_served and not gets_updates:
                return Artifact(hub_reference(table))
            source = served_copy(copy) if is_served and gets_updates else copy
            origin = await download_repository(key, table, source)
            if not is_served:
                return Artifact(origin)
            wanted = origin.filenames
        names = list(wanted)
        if source != copy:
            names = await anyio.to_thread.run_sync(_copy_files, key, source, wanted, copy)
        return await self._serve(name, source if gets_updates else copy, names, origin)

    async def _serve(
        self, name: str, folder: Path, names: Sequence[str], origin: HuggingFaceReference | None
    ) -> Artifact:
        files = [PullSource(folder / file, (await describe(folder / file))[1]) for file in names]
        resource = SliceAddress(dataset=artifact_dataset(self.job_id, name), index=0)
        reference = PeersReference(peers=(self.scheduler,), strategy=One(), resource=resource, filenames=tuple(names))
        return Artifact(reference, tuple(files), None if origin is None else replace(origin, token=None))


async def _create(model: StartModelTable, target: Path, command: Sequence[str]) -> StartModelTable:
    """Create a model in `target` and return the table of a job that starts from there."""
    await anyio.to_thread.run_sync(remove_tree, target)
    await create_model(model, target, command)
    return model.model_copy(update={"path": target, "config": None})


def _take(key: str, table: ArtifactTable, copy: Path) -> tuple[list[str], HuggingFaceReference | None]:
    """Copy or download a model or preprocessor, completely or not at all, unless there is a copy already.

    Returns:
        The names of its files, and where they were downloaded from.
    """
    origin: HuggingFaceReference | None = None
    try:
        if not copy.exists():
            with replace_directory(copy) as folder:
                if table.path is None:
                    origin = _download(key, table, folder)
                else:
                    _copy_files(key, table.path, table.filenames, folder)
        return sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()), origin
    except OSError as error:
        raise JobFailedError(files_unusable(copy.parent, [error])) from None


def served_copy(copy: Path) -> Path:
    """Return the directory from which a start model of a hub is served while its job runs, beside the job's `copy`."""
    return copy.with_name(f".{copy.name}-served")


def _copy_files(key: str, source: Path, wanted: tuple[str, ...], target: Path) -> list[str]:
    """Copy the files of a local model or preprocessor; return their names."""
    names = file_names("model" if key == "model" else "preprocessor", source, wanted)
    try:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise JobFailedError(f"{key}.path: {source} cannot be copied: {error}") from None
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

    try:
        await anyio.to_thread.run_sync(apply_update_to_dir, model, update)
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
        sync(path)
