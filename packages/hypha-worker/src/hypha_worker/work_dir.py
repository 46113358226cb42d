"""The folders that a worker keeps tasks and sockets in: preparing, locking and clearing them."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from hypha_worker.task_files import TaskFiles

_log = logging.getLogger(__name__)

SOCKET_FOLDER_LIMIT: Final = 90
"""Bytes of the folder's path that leave enough space for the name of a socket."""
_JOB_FOLDER: Final = re.compile(r"(hypha|outputs|incoming)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def prepare_work_dir(folder: Path) -> None:
    """Create the work directory if it is missing; warn if other users may read it.

    Raises:
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & ~0o750:
        _log.warning("work_dir %s has mode %04o, wider than 0750: run chmod 750 %s", folder, mode, folder)


def control_folder(work_dir: Path) -> Path:
    """Return the folder of what is its owner's alone: the control socket, whether it is paused, and the accounts."""
    return work_dir / "control"


def prepare_control_folder(work_dir: Path) -> Path:
    """Create the folder of `control_folder` if it is missing, so that only the worker's user may enter it; return it.

    Raises:
        OSError: it cannot be created, or is a link, or belongs to another user.
    """
    folder = control_folder(work_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


@functools.cache
def work_dir_key(folder: Path) -> str:
    """Return a name for a work directory by which what its worker has left elsewhere is found: 12 hex digits."""
    return hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12]


def clear_work_dir(folder: Path, stack: ExitStack, end_processes: Callable[[], None] = lambda: None) -> None:
    """Remove what a killed worker has left, unless another worker uses the work directory.

    The folder stays locked until `stack` is closed, so that no other worker removes this one's tasks.

    Args:
        folder: the work directory.
        stack: holds the lock.
        end_processes: ends the processes that the worker has left; called first.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end_processes()
        found = [path for path in folder.iterdir() if _JOB_FOLDER.fullmatch(path.name)]
        for path in [*found, *_left_socket_folders(folder)]:
            _log.warning("removing %s, left by a worker that was killed", path)
            remove_folder(path)
    except BlockingIOError:
        _log.info("work_dir %s is used by another worker: what killed workers left is not removed", folder)
    except OSError as error:
        _log.warning("work_dir %s cannot be locked, what killed workers left is not removed: %s", folder, error)
        return
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def remove_task_files(files: TaskFiles) -> None:
    """Close a task's files and remove both of its folders, as `remove_folder` does."""
    files.close()
    remove_folder(files.work_dir)
    remove_folder(files.staging)


def remove_folder(folder: Path) -> None:
    """Remove as much of a folder as possible; log a warning if something of it stays."""
    if not os.path.lexists(folder):
        return
    errors = [NotADirectoryError(f"{folder} is a symbolic link")] if folder.is_symlink() else _remove_tree(folder)
    if errors:
        _log.warning(
            "%s cannot be removed completely; remove it by hand, it takes up disk space: %s", folder, errors[0]
        )


def _remove_tree(folder: Path) -> list[OSError]:
    """Remove a folder; return what went wrong.

    Folders in it may be nested deeper than Python recurses, and than a path may be long. Each is therefore moved up
    into `folder` before it is emptied. All are opened without following links: a process that is left of the task may
    put one in the place of a folder.
    """
    errors: list[OSError] = []
    with _collecting(errors):
        root = _open_folder(folder)
        try:
            _remove_content(root, errors)
        finally:
            os.close(root)
        os.rmdir(folder)
    return errors


def _remove_content(root: int, errors: list[OSError]) -> None:
    found = _remove_files(root, root, 0, errors)
    for name in found:  # which grows
        with _collecting(errors):
            current = _open_folder(name, root)
            try:
                found += _remove_files(current, root, len(found), errors)
            finally:
                os.close(current)
    for name in reversed(found):
        with _collecting(errors):
            os.rmdir(name, dir_fd=root)


def _remove_files(current: int, root: int, count: int, errors: list[OSError]) -> list[str]:
    """Remove the files of an open folder, and move its folders to `root`; return their names there."""
    with os.scandir(current) as entries:
        listed = list(entries)
    prefix = uuid.uuid4().hex
    moved: list[str] = []
    for entry in listed:
        with _collecting(errors):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=current)
                continue
            name = entry.name if current == root else f"{prefix}-{count + len(moved)}"
            if current != root:
                os.close(_open_folder(entry.name, current))  # a folder must be writable to be moved
                os.rename(entry.name, name, src_dir_fd=current, dst_dir_fd=root)
            moved.append(name)
    return moved


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    """Open a folder, which is no link, and let its owner do everything in it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(path, 0o700, dir_fd=parent)
        descriptor = os.open(path, flags, dir_fd=parent)
    os.fchmod(descriptor, 0o700)
    return descriptor


@contextmanager
def _collecting(errors: list[OSError]) -> Iterator[None]:
    """Go on after an error, which is kept if it is the first."""
    try:
        yield
    except FileNotFoundError:
        pass  # somebody else has removed it
    except OSError as error:
        if not errors:
            errors.append(error)


def _socket_base() -> str:
    """Return a folder for temporary files whose path is short enough."""
    base = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(base)) > SOCKET_FOLDER_LIMIT - len("/hypha-0123456789ab-12345678") else base


def _left_socket_folders(work_dir: Path) -> list[Path]:
    return [path for path in Path(_socket_base()).glob(f"hypha-{work_dir_key(work_dir)}-*") if _is_own(path)]


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


@contextmanager
def open_socket_folder(work_dir: Path) -> Iterator[Path]:
    """Create a private folder whose path is short enough for Unix sockets; remove it on exit.

    Its name tells whose it is, so that a worker with the same work directory removes what a killed one has left.
    """
    prefix = f"hypha-{work_dir_key(work_dir)}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_socket_base(), ignore_cleanup_errors=True) as folder:
        yield Path(folder)
