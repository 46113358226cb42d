"""Artifacts of a job: models and preprocessors that this scheduler serves to executors, and the result file."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from hypha_net.transfer import PullSource, describe
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, One, PeersReference, Reference, SliceAddress
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError, files_unusable
from hypha_scheduler.jobs.config import ModelTable, PreprocessorTable
from hypha_scheduler.jobs.model_files import MODEL_PATTERNS, model_names, preprocessor_names

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

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return the requested file, or a refusal."""
        if request.index >= len(self.files):
            return Refusal(reason=f"there are {len(self.files)} files, none with index {request.index}")
        return self.files[request.index].offered


def artifact_dataset(job_id: uuid.UUID, name: str) -> str:
    """Return the dataset name under which an artifact of a job is served."""
    return f"{job_id}/{name}"


async def open_preprocessor(
    table: PreprocessorTable | None, copy: Path, job_id: uuid.UUID, scheduler: PeerId, name: str = "preprocessor"
) -> Artifact | None:
    """Copy a local preprocessor to `copy` and return it for serving as `name`; None if executors fetch it from the hub.

    Raises:
        JobFailedError: the directory does not exist or holds no preprocessor files.
    """
    if table is None or table.path is None:
        return None
    names = await anyio.to_thread.run_sync(_copy_preprocessor, table.path, table.filenames, copy)
    files = [ArtifactFile(file, PullSource(copy / file, (await describe(copy / file))[1])) for file in names]
    return _served_artifact(scheduler, artifact_dataset(job_id, name), files)


def _served_artifact(scheduler: PeerId, dataset: str, files: list[ArtifactFile]) -> Artifact:
    names = tuple(file.name for file in files)
    resource = SliceAddress(dataset=dataset, index=0)
    return Artifact(
        PeersReference(peers=(scheduler,), strategy=One(), resource=resource, filenames=names), tuple(files)
    )


def hub_reference(table: PreprocessorTable) -> HuggingFaceReference:
    """Return where executors fetch a preprocessor from its hub."""
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
    model: ModelTable, copy: Path, job_id: uuid.UUID, scheduler: PeerId, name: str = "model"
) -> Artifact:
    """Copy a start model to `copy` and return where executors fetch it: from its hub, or served here as `name`.

    Files that an earlier run of the job has left in `copy` are overwritten.

    Raises:
        JobFailedError: the directory or repository does not exist or holds no model.
    """
    if model.path is None:
        return Artifact(await anyio.to_thread.run_sync(_download, model, copy, abandon_on_cancel=True))
    names = await anyio.to_thread.run_sync(_copy_model, model.path, model.filenames, copy)
    files = []
    for file in names:
        path = model.path / file
        files.append(ArtifactFile(file, PullSource(path, (await describe(path))[1])))
    return _served_artifact(scheduler, artifact_dataset(job_id, name), files)


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
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(result, indent=2) + "\n")
        sync_to_disk(part)
        os.replace(part, path)
        sync_to_disk(path)
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
