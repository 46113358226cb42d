"""Checking, moving and copying the files of outputs, with blocking calls that run in threads and end when cancelled.

Called by `output_store` and `resource_fetcher`. Nothing here follows a symbolic link.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import anyio.from_thread
from blake3 import blake3

from hypha_proto.tasks import MAX_PATH, StoredFile
from hypha_worker.errors import ExecutionError
from hypha_worker.job_storage import JobStorage
from hypha_worker.work_dir import remove_folder

_log = logging.getLogger(__name__)

_BLOCK: Final = 1 << 20
_COPIED_AT_ONCE: Final = 64 << 20
_NO_COPY_RANGE: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class OutputError(ExecutionError):
    """An output cannot be stored; the message names the file."""


def list_files(name: str, work_dir: Path, path: str, limit: int) -> list[tuple[str, int]]:
    """Return relative path and size of each file of an output, sorted; the path is empty for a single file.

    Args:
        name: the output, for errors.
        work_dir: the task's work directory.
        path: path of the output in it.
        limit: largest number of files.

    Raises:
        OutputError: it does not exist, is not below `work_dir`, or is neither a regular file nor a folder of such.
    """
    _check_parents(name, work_dir, path)
    root = work_dir / path
    try:
        mode = root.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError(f"output {name}: the executor made no {path[:80]!r} in its work directory") from None
    if stat.S_ISREG(mode):
        return [("", root.lstat().st_size)]
    if not stat.S_ISDIR(mode):
        raise OutputError(f"output {name}: {path[:80]!r} is {_kind(mode)}, neither a regular file nor a folder")
    found = []
    for file, size in _walk(name, root, ""):
        found.append((file, size))
        if len(found) > limit:
            raise OutputError(f"output {name}: {path[:80]!r} holds more than {limit} files: pack them into an archive")
    return sorted(found)


def _check_parents(name: str, work_dir: Path, path: str) -> None:
    """Refuse a path that leads through a symbolic link, perhaps out of the work directory."""
    for parent in list((work_dir / path).relative_to(work_dir).parents)[:-1]:
        if (work_dir / parent).is_symlink():
            raise OutputError(f"output {name}: {str(parent)[:80]!r} in its path is a symbolic link")


def _walk(name: str, root: Path, folder: str) -> Iterator[tuple[str, int]]:
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                yield from _walk(name, root, path)
            elif not stat.S_ISREG(mode):
                raise OutputError(
                    f"output {name}: {path[:120]!r} is {_kind(mode)}, neither a regular file nor a folder"
                )
            else:
                _check_name(name, path)
                yield path, entry.stat(follow_symlinks=False).st_size


def _check_name(name: str, path: str) -> None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise OutputError(f"output {name}: the name of the file {path[:120]!a} is not UTF-8") from None
    if size > MAX_PATH:
        raise OutputError(f"output {name}: the path {path[:80]!r}… is longer than {MAX_PATH} bytes")


def _kind(mode: int) -> str:
    return next((text for matches, text in _KINDS if matches(mode)), "a special file")


def describe_files(root: Path, paths: list[str]) -> tuple[StoredFile, ...]:
    """Return size and digest of each file below `root`; an empty path is `root` itself."""
    return tuple(_describe(root, path) for path in paths)


def _describe(root: Path, path: str) -> StoredFile:
    hasher, size = blake3(), 0
    with _open_regular(root / path if path else root) as file:
        while block := os.read(file.fileno(), _BLOCK):
            anyio.from_thread.check_cancelled()
            hasher.update(block)
            size += len(block)
    return StoredFile(path, size, f"blake3:{hasher.hexdigest()}")


def copy_files(source: Path, target: Path, paths: list[str], storage: JobStorage | None) -> None:
    """Copy files below `source` to `target`; see `copy_file`."""
    if paths != [""]:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in paths:
        copy_file(source / path if path else source, target / path if path else target, storage)


def copy_file(source: Path, target: Path, storage: JobStorage | None) -> int:
    """Copy a regular file, where the file system can by sharing its blocks; return its size.

    Args:
        source: the file.
        target: the copy, which must not exist.
        storage: what the copy counts against, unless its space is reserved already.

    Raises:
        StorageExceededError: the task's files would exceed its storage.
        OSError: it is no regular file, or cannot be read or written.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _open_regular(source) as reader, target.open("xb", buffering=0) as writer:
        try:
            if storage is not None:
                storage.reserve(target, os.fstat(reader.fileno()).st_size)
            _copy(reader.fileno(), writer.fileno())
            return os.fstat(writer.fileno()).st_size
        except BaseException:
            target.unlink()
            raise
        finally:
            if storage is not None:
                storage.release(target)


def _copy(reader: int, writer: int) -> None:
    try:
        while os.copy_file_range(reader, writer, _COPIED_AT_ONCE):
            anyio.from_thread.check_cancelled()
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        while block := os.read(reader, _BLOCK):
            anyio.from_thread.check_cancelled()
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(writer, rest) :]


class _Descriptor:
    """An open file without a buffer, closed at the end of a `with`."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def __enter__(self) -> _Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def _open_regular(path: Path) -> _Descriptor:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return _Descriptor(number)


def remove_output(path: Path) -> None:
    """Remove a stored output, a file or a folder, as far as possible; no error if it is gone."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed; remove it by hand, it takes up disk space: %s", path, error)
