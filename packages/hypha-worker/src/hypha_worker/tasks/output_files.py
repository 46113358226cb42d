"""Checking, moving and copying the files of outputs, with blocking calls that run in threads and end when cancelled.

Nothing here follows a symbolic link.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path, PurePosixPath

from blake3 import blake3

from hypha_proto.ids import MAX_PATH
from hypha_proto.tasks import StoredFile
from hypha_worker.errors import ExecutionError
from hypha_worker.file_copy import copy_range, hash_file
from hypha_worker.openat import LinkInPathError, irregular_kind, open_regular_path
from hypha_worker.task_files import TaskFiles
from hypha_worker.task_storage import TaskStorage
from hypha_worker.work_dir import remove_folder

_log = logging.getLogger(__name__)


class OutputError(ExecutionError):
    """An output cannot be stored; the message names the file."""


def list_files(name: str, files: TaskFiles, path: str, limit: int) -> list[tuple[str, int]]:
    """Return relative path and size of each file of an output, sorted; the path is empty for a single file.

    Args:
        name: the output, for errors.
        files: the task's files.
        path: path of the output in its work directory.
        limit: largest number of files.

    Raises:
        OutputError: it does not exist, is reached through a link, or is neither a regular file nor a folder of such.
    """
    try:
        about = files.stat(PurePosixPath(path))
        if not stat.S_ISDIR(about.st_mode):
            _check_regular(name, path, about)
            return [("", about.st_size)]
        found = []
        for file, size in _walk(name, files, path):
            found.append((file, size))
            if len(found) > limit:
                raise OutputError(f"output {name}: {path!r} holds more than {limit} files: pack them into an archive")
    except LinkInPathError:
        raise OutputError(f"output {name}: a folder in its path {path!r} is a symbolic link") from None
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError(f"output {name}: the executor made no {path!r} in its work directory") from None
    return sorted(found)


def _walk(name: str, files: TaskFiles, folder: str) -> Iterator[tuple[str, int]]:
    for path, about in files.walk(folder):
        _check_name(name, path)
        if not stat.S_ISDIR(about.st_mode):
            _check_regular(name, path, about)
            yield path, about.st_size


def _check_regular(name: str, path: str, about: os.stat_result) -> None:
    if (kind := irregular_kind(about)) is not None:
        raise irregular_output(name, path, kind)


def irregular_output(name: str, path: str, kind: str) -> OutputError:
    """Return the error of an output with something in it that is not a regular file of its own."""
    return OutputError(f"output {name}: {path!r} is {kind}, neither a regular file nor a folder")


def _check_name(name: str, path: str) -> None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise OutputError(f"output {name}: the name of the file {path!a} is not UTF-8") from None
    if size > MAX_PATH:
        raise OutputError(f"output {name}: the path {path!r} is longer than {MAX_PATH} bytes")


def describe_files(root: Path, paths: list[str]) -> tuple[StoredFile, ...]:
    """Return size and digest of each file below `root`, a folder of this worker; an empty path is `root` itself."""
    found = []
    for path in paths:
        with open_regular_path(root / path if path else root) as file:
            found.append(describe_file(file, path))
    return tuple(found)


def describe_file(file: FileIO, path: str) -> StoredFile:
    """Return size and digest of an open file, to be known as `path`; what it grows by meanwhile is left out."""
    return StoredFile(path, *hash_file(file, blake3()))


def copy_file(source: Path | FileIO, target: Path, storage: TaskStorage | None) -> int:
    """Copy a regular file, where the file system can by sharing its blocks; return its size.

    Args:
        source: a file of this worker, or an open one.
        target: the copy, which must not exist, in a folder of this worker.
        storage: what the copy counts against, unless its space is reserved already.

    Raises:
        StorageExceededError: the task's files would exceed its storage.
        OSError: it is no regular file, or cannot be read or written.
    """
    if isinstance(source, Path):
        with open_regular_path(source) as file:
            return copy_file(file, target, storage)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    size = os.fstat(source.fileno()).st_size
    with target.open("xb", buffering=0) as writer:
        try:
            if storage is not None:
                storage.reserve(target, size)
            return copy_range(source.fileno(), writer.fileno(), size)
        except BaseException:
            target.unlink()
            raise
        finally:
            if storage is not None:
                storage.release(target)


def remove_output(path: Path) -> None:
    """Remove a stored output, a file or a folder, as far as possible; no error if it is gone."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed; remove it by hand, it takes up disk space: %s", path, error)
