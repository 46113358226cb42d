"""Download of a repository's files from a Hugging Face hub, bounded by what the hub states and by the disk.

`huggingface_hub` resumes what breaks off; its `snapshot_download` compares the size only when a transfer has ended, and
one without a stated size may never end, so each file is written through `_BoundedFile`. With ``HF_HUB_OFFLINE`` the
files are copied from the hub's cache on this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Final

import anyio.from_thread

from hypha_proto.codec import from_json
from hypha_proto.datasets import MANIFEST, Manifest
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import INDEX_LIMIT, list_companions, list_model, reader_of
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.source_download import room_for_downloads
from hypha_scheduler.jobs.source_tables import Content

MAX_UNSTATED: Final = 10 * 10**9
"""Bytes that all files of a repository together may have whose size the hub does not state."""


class TooLargeError(Exception):
    """A file has more bytes than it may have."""


@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """Files of a repository, as a job's table names them."""

    key: str
    """Table for errors: ``model``."""
    repository: str
    revision: str | None
    token: str | None
    filenames: Sequence[str]
    """If empty, all that belong to the model or preprocessor (`hypha_proto.model_listing`), or to the dataset."""
    content: Content = "model"
    """What they are: models and preprocessors are checked."""

    @property
    def type(self) -> str:
        """Type of the repository."""
        return "dataset" if self.content == "dataset" else "model"


@dataclass(frozen=True, slots=True)
class _HubFile:
    name: str
    url: str
    size: int | None
    """As the hub states it."""


class _BoundedFile(BufferedWriter):
    """A file of at most `limit` bytes, whose writer is stopped when its caller is cancelled."""

    def __init__(self, path: Path, limit: int, reason: str) -> None:
        super().__init__(FileIO(path, "w"))
        self._limit = limit
        self._reason = reason

    def write(self, data: Any, /) -> int:
        """Write a block.

        Raises:
            TooLargeError: the file would become too large.
        """
        anyio.from_thread.check_cancelled()
        if self.tell() + memoryview(data).nbytes > self._limit:
            raise TooLargeError(self._reason)
        return super().write(data)


def download(source: RepositoryFiles, target: Path) -> tuple[str, tuple[str, ...]]:
    """Download the files to `target`, under their names in the repository; return the commit and the names.

    Raises:
        JobFailedError: they do not exist, cannot be fetched or are unusable, or there is no room for them.
    """
    from huggingface_hub import constants  # imported late: takes 0.5 s

    with _hub_errors(what := f"{source.key}.repository: {source.repository}"):
        target.mkdir(parents=True, exist_ok=True)
        commit, names = (_copy_cached if constants.HF_HUB_OFFLINE else _fetch)(source, target)
        if source.content in ("model", "preprocessor") and (fault := find_fault(target, names)):
            raise JobFailedError(f"{what}: {fault}")
    return commit, tuple(names)


def needs_token(key: str, repository: str, revision: str | None, name: str) -> bool:
    """Return whether a repository can be read with this machine's own token of the hub, and not without one.

    With ``HF_HUB_OFFLINE`` the hub is not asked, and a repository is taken to need the token, if there is one.

    Args:
        key: table for errors: ``model``.
        repository: of the hub.
        revision: branch, tag or commit.
        name: file for which the hub is asked.

    Raises:
        JobFailedError: the hub cannot be asked.
    """
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None or constants.HF_HUB_OFFLINE:
        return get_token() is not None
    with _hub_errors(f"{key}.repository: {repository}"):
        url = hf_hub_url(repository, name, revision=revision, endpoint=os.environ.get("HF_ENDPOINT"))
        try:
            get_hf_file_metadata(url, token=False)
        except HfHubHTTPError as error:
            return error.response.status_code in (401, 403)
    return False


@contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except JobFailedError:
        raise
    except TensorFileError as error:
        raise JobFailedError(f"{what}: {error}") from None
    except (HfHubHTTPError, HFValidationError, TooLargeError, OSError) as error:
        raise JobFailedError(f"{what} cannot be fetched: {_without_signature(error)}") from None
    except Exception as error:  # connection errors of an HTTP library that depends on the version of huggingface_hub
        raise JobFailedError(f"{what} cannot be fetched: {error!r}") from error


def _fetch(source: RepositoryFiles, target: Path) -> tuple[str, list[str]]:
    """Download the files from the hub; return the commit and the names."""
    commit, files = _list_files(source, target)
    _check_room(source, sum(file.size or 0 for file in files), target)
    _download_all(files, source.token, target)
    return commit, [file.name for file in files]


def _copy_cached(source: RepositoryFiles, target: Path) -> tuple[str, list[str]]:
    """Copy the files from the hub's cache; return the commit and the names."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(
            snapshot_download(source.repository, repo_type=source.type, revision=source.revision, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        raise JobFailedError(
            f"{source.key}.repository: {source.repository} is not in the hub's cache at revision "
            f"{source.revision or 'main'}, and HF_HUB_OFFLINE is set: download it there first, or unset the variable"
        ) from None
    present = [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if path.is_file()]
    names = _choose(source, present, reader_of(snapshot))
    _check_room(source, sum((snapshot / name).stat().st_size for name in names), target)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(snapshot / name, target / name)
    return snapshot.name, names


def _check_room(source: RepositoryFiles, size: int, target: Path) -> None:
    if size > (room := room_for_downloads(target)):
        raise JobFailedError(
            f"{source.key}.repository: {source.repository} has {size} bytes, and the disk has room for {room}: free "
            f"space for {target}"
        )


def _choose(source: RepositoryFiles, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return which files of a repository are wanted; `read` reads an index."""
    if lacking := [name for name in source.filenames if name not in names]:
        raise JobFailedError(f"{source.key}.filenames: {source.repository} has no {', '.join(lacking)}")
    if source.content == "model":
        return list_model(names, read, source.filenames)
    if source.content == "dataset":
        return _list_dataset(source, names, read)
    return list(source.filenames) or list_companions(names)


def _list_dataset(source: RepositoryFiles, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the manifest of a prepared dataset, and those of its slices that a repository has."""
    what = f"{source.key}.repository: {source.repository}"
    if MANIFEST not in names:
        raise JobFailedError(f"{what} has no {MANIFEST} at its root: upload the folder that hypha-data prepare wrote")
    try:
        manifest: Manifest = from_json(Manifest, read(MANIFEST), INDEX_LIMIT)
    except DecodeError as error:
        raise JobFailedError(f"{what} holds no dataset: its {MANIFEST}: {error}") from None
    return [MANIFEST, *sorted({entry.file for entry in manifest.slices} & {name for name in names if "/" not in name})]


def _list_files(source: RepositoryFiles, target: Path) -> tuple[str, list[_HubFile]]:
    """Return the commit of the revision, and the files to fetch; the index of weights or manifest is fetched for it."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    api = HfApi(endpoint=endpoint, token=source.token)
    describe = api.dataset_info if source.content == "dataset" else api.model_info
    found = describe(source.repository, revision=source.revision)
    commit = found.sha or source.revision or "main"
    names = [sibling.rfilename for sibling in found.siblings or ()]

    def look_up(name: str) -> _HubFile:
        url = hf_hub_url(source.repository, name, repo_type=source.type, revision=commit, endpoint=endpoint)
        return _HubFile(name, url, get_hf_file_metadata(url, token=source.token).size)

    def read(name: str) -> bytes:
        reason = f"{name} is longer than {INDEX_LIMIT} bytes"
        _download_file(look_up(name), source.token, target / name, INDEX_LIMIT, reason)
        return (target / name).read_bytes()

    return commit, [look_up(name) for name in _choose(source, names, read)]


def _download_all(files: Sequence[_HubFile], token: str | None, target: Path) -> None:
    unstated = MAX_UNSTATED
    for file in files:
        if file.size is None:
            limit = min(unstated, room_for_downloads(target))
            reason = f"{file.name}: the hub states no size, and it has more than {limit} bytes"
        else:
            limit, reason = file.size, f"{file.name}: the hub stated {file.size} bytes, and sends more"
        received = _download_file(file, token, target / file.name, limit, reason)
        unstated -= received if file.size is None else 0


def _download_file(file: _HubFile, token: str | None, target: Path, limit: int, reason: str) -> int:
    """Download a file; return its size."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    headers = {**build_hf_headers(token=token), "accept-encoding": "identity"}
    try:
        with _BoundedFile(part, limit, reason) as writer:
            # the client follows redirects, and sends the token to the hub's own origin only
            http_get(file.url, writer, headers=headers, expected_size=file.size, displayed_filename=file.name)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target.stat().st_size


def _without_signature(error: Exception) -> str:
    """Return the message without the query of a storage server's URL, which is signed."""
    url = getattr(getattr(error, "response", None), "url", None)
    text = str(error)
    return text if url is None else text.replace(str(url), str(url).partition("?")[0])
