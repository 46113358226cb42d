"""Download of a repository's files from a Hugging Face hub, bounded by what the hub states and by the disk.

Called by `artifacts`, in a thread. `huggingface_hub` resumes what breaks off; its `snapshot_download` compares the size
only when a transfer has ended, and one without a stated size may never end, so each file is written through
`_BoundedFile`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Final

import anyio.from_thread

from hypha_proto.errors import TensorFileError
from hypha_proto.model_contents import find_fault
from hypha_proto.model_listing import INDEX_LIMIT, list_companions, list_model
from hypha_scheduler.errors import JobFailedError

MAX_UNSTATED: Final = 10 * 10**9
"""Bytes that all files of a repository together may have whose size the hub does not state."""
RESERVE: Final = 256 * 10**6
"""Bytes of the disk that no download uses."""


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
    """If empty, all that belong to the model or preprocessor (`hypha_proto.model_listing`)."""
    is_model: bool = True
    """Whether weights are fetched too."""


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
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # imported late: takes 0.5 s

    what = f"{source.key}.repository: {source.repository}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        commit, files = _list_files(source, target)
        stated = sum(file.size or 0 for file in files)
        if stated > (room := _room(target)):
            raise JobFailedError(
                f"{what} has {stated} bytes, and the disk has room for {room}: free space for {target}"
            )
        _download_all(files, source.token, target)
        if fault := find_fault(target, [file.name for file in files]):
            raise JobFailedError(f"{what}: {fault}")
    except JobFailedError:
        raise
    except TensorFileError as error:
        raise JobFailedError(f"{what}: {error}") from None
    except (HfHubHTTPError, HFValidationError, TooLargeError, OSError) as error:
        raise JobFailedError(f"{what} cannot be fetched: {_without_signature(error)}") from None
    except Exception as error:  # connection errors of an HTTP library that depends on the version of huggingface_hub
        raise JobFailedError(f"{what} cannot be fetched: {error!r:.400}") from error
    return commit, tuple(file.name for file in files)


def _list_files(source: RepositoryFiles, target: Path) -> tuple[str, list[_HubFile]]:
    """Return the commit of the revision, and the files to fetch; an index of weights is fetched for it."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    found = HfApi(endpoint=endpoint, token=source.token).model_info(source.repository, revision=source.revision)
    commit = found.sha or source.revision or "main"
    names = [sibling.rfilename for sibling in found.siblings or ()]
    if lacking := [name for name in source.filenames if name not in names]:
        raise JobFailedError(f"{source.key}.filenames: {source.repository} has no {', '.join(lacking)}")

    def look_up(name: str) -> _HubFile:
        url = hf_hub_url(source.repository, name, revision=commit, endpoint=endpoint)
        return _HubFile(name, url, get_hf_file_metadata(url, token=source.token).size)

    def read(name: str) -> bytes:
        reason = f"{name} is longer than {INDEX_LIMIT} bytes"
        _download_file(look_up(name), source.token, target / name, INDEX_LIMIT, reason)
        return (target / name).read_bytes()

    if source.is_model:
        wanted = list_model(names, read, source.filenames)
    else:
        wanted = list(source.filenames) or list_companions(names)
    return commit, [look_up(name) for name in wanted]


def _room(folder: Path) -> int:
    return max(0, shutil.disk_usage(folder).free - RESERVE)


def _download_all(files: Sequence[_HubFile], token: str | None, target: Path) -> None:
    unstated = MAX_UNSTATED
    for file in files:
        if file.size is None:
            limit = min(unstated, _room(target))
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
