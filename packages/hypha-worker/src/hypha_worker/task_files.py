"""A task's folder, which its processes may change at any time, and the folder where files for it are completed.

Incoming files are written in the staging folder, outside of the task's reach, checked there, and moved into the task's
folder when they are complete. Everything in the task's folder is reached from one descriptor, opened before the task's
first process, and through no symbolic link (`openat`). Names and paths that executors and peers choose must stay inside
of it. Travels with a task as `task_storage.TaskStorage.files`; used by `connectors`, `bridge`, `tasks` and `executors`.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

from hypha_worker.errors import BridgeError, bad_request, is_disk_fault, job_ending, not_found
from hypha_worker.openat import (
    IrregularFileError,
    LinkInPathError,
    irregular_kind,
    make_folder,
    open_folder,
    open_regular,
    walk,
)

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def safe_name(text: str) -> str:
    """Make a file name from a name that a peer or task chose: letters, digits and ``._-``, never hidden or empty."""
    return _UNSAFE.sub("-", text)[-100:].lstrip(".-") or "file"


STAGING_PREFIX: Final = "incoming-"
"""Begin of the name of a staging folder, which lies beside the task's folder."""
_JOB_PREFIX: Final = "hypha-"


class TaskEndedError(FileNotFoundError):
    """The task's folder is closed."""


class TaskFiles:
    """The files of one task. Its methods may be called in any thread; they block for as long as the disk takes."""

    def __init__(self, work_dir: Path) -> None:
        """Prepare; `create` makes the folder. One that exists already is opened with the first access.

        Args:
            work_dir: the task's folder.
        """
        self.work_dir = work_dir
        self.staging = work_dir.with_name(f"{STAGING_PREFIX}{work_dir.name.removeprefix(_JOB_PREFIX)}")
        """Where files are completed: on the same file system, and this process's alone."""
        self._root: int | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------------- lifetime

    def create(self) -> None:
        """Make the task's folder, which must not exist.

        Raises:
            OSError: it cannot be made.
        """
        self.work_dir.mkdir(mode=0o700)
        with self._opened():
            pass

    def close(self) -> None:
        """Close the task's folder; further calls raise `TaskEndedError`, or a `BridgeError` that says so."""
        with self._lock:
            self._is_closed = True
            if self._root is not None:
                os.close(self._root)
                self._root = None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield a descriptor of the task's folder, of this call alone: `close` may be called meanwhile."""
        with self._lock:
            if self._is_closed:
                raise TaskEndedError(errno.ENOENT, "the job is ending", str(self.work_dir))
            if self._root is None:
                self._root = os.open(self.work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            root = os.dup(self._root)
        try:
            yield root
        finally:
            os.close(root)

    # -------------------------------------------------------------------------------------------------------- staging

    def staging_folder(self) -> Path:
        """Return the folder for incomplete files, which is made if it is missing."""
        self.staging.mkdir(mode=0o700, exist_ok=True)
        return self.staging

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a path for a new file or folder in `staging_folder`; remove what is still there on exit."""
        path = self.staging_folder() / secrets.token_hex(8)
        try:
            yield path
        finally:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    # ----------------------------------------------------------------------------------------------------- publishing

    def make_folder(self, text: str) -> PurePosixPath:
        """Return the relative path of a folder that an executor names; make it if it is missing.

        Raises:
            BridgeError: the path cannot be used.
        """
        path = PurePosixPath(text)
        with _errors(text, _folder_error), self._opened() as root, make_folder(root, path):
            return path

    def publish(self, staged: Path, path: PurePosixPath) -> None:
        """Move a complete file or folder from the staging folder into the task's; a file of this name is replaced.

        Raises:
            BridgeError: the path leads through a link or a file, or names a folder.
            OSError: it cannot be moved.
        """
        with _errors(str(path), _folder_error), self._opened() as root, make_folder(root, path.parent) as parent:
            os.rename(staged, path.name, dst_dir_fd=parent)

    def publish_tree(self, staged: Path, path: PurePosixPath) -> None:
        """Move the files of a complete folder into a folder of the task, which may exist.

        Raises:
            FileExistsError: there is a file of the same name.
            BridgeError, OSError: as `publish`.
        """
        for folder, _, names in os.walk(staged):
            inner = path / Path(folder).relative_to(staged).as_posix()
            for name in names:
                if self.exists(inner / name):
                    raise FileExistsError(errno.EEXIST, "exists already", str(inner / name))
                self.publish(Path(folder, name), inner / name)

    def publish_beside(self, staged: Path, folder: PurePosixPath, name: str) -> PurePosixPath:
        """Move a complete file to a path that nothing has; return it: ``name``, or ``stem-1.suffix`` and so on.

        Raises:
            BridgeError, OSError: as `publish`.
        """
        stem, suffix, numbers = Path(name).stem, Path(name).suffix, itertools.count(1)
        path = folder / name
        while self.exists(path):
            path = folder / f"{stem}-{next(numbers)}{suffix}"
        self.publish(staged, path)
        return path

    def write_file(self, name: str, content: bytes) -> Path:
        """Write a new file that only its owner may read into the task's folder, and return its absolute path.

        Raises:
            OSError: it cannot be written, or there is one of this name.
        """
        with self._opened() as root:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=root), "wb") as file:
                file.write(content)
        return self.work_dir / name

    # -------------------------------------------------------------------------------------------------------- reading

    def exists(self, path: PurePosixPath) -> bool:
        """Return whether there is anything at a relative path, a dangling link included."""
        with self._opened() as root:
            try:
                with open_folder(root, str(path.parent)) as parent:
                    os.stat(path.name, dir_fd=parent, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, LinkInPathError):
                return False
        return True

    def open_file(self, text: str) -> FileIO:
        """Open a regular file that an executor names, which has no other name; it is read from this descriptor on.

        Raises:
            BridgeError: there is none, or it is something else.
        """
        path = PurePosixPath(text)
        with _errors(text, _file_error):
            return self.open_regular(path)

    def open_regular(self, path: PurePosixPath) -> FileIO:
        """Open a regular file at a relative path.

        Raises:
            OSError: see `openat.open_regular`.
        """
        with self._opened() as root:
            return open_regular(root, path)

    def stat(self, path: PurePosixPath) -> os.stat_result:
        """Return the status of what is at a relative path; a link is not followed. Raises `OSError`."""
        with self._opened() as root, open_folder(root, str(path.parent)) as parent:
            return os.stat(path.name or ".", dir_fd=parent, follow_symlinks=False)

    def walk(
        self, path: str = "", skip: Callable[[str], bool] = lambda _path: False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield what is beneath a folder, as `openat.walk` does. Raises `OSError`."""
        with self._opened() as root:
            yield from walk(root, path, skip)

    def take(self, path: PurePosixPath, target: Path) -> None:
        """Move a regular file out of the task's folder, to a path that only this process can reach.

        Raises:
            IrregularFileError: it is something else, and is gone.
            OSError: it cannot be moved.
        """
        with self._opened() as root, open_folder(root, str(path.parent)) as parent:
            os.rename(path.name, target, src_dir_fd=parent)
        about = target.lstat()
        if (kind := irregular_kind(about)) is not None:
            raise IrregularFileError(str(path), kind)


@contextmanager
def _errors(text: str, explain: Callable[[str, OSError], BridgeError]) -> Iterator[None]:
    """Let `explain` translate what goes wrong with a path that an executor names."""
    try:
        yield
    except TaskEndedError:
        raise job_ending() from None
    except OSError as error:
        if is_disk_fault(error):
            raise
        raise explain(text, error) from None


def _file_error(text: str, error: OSError) -> BridgeError:
    """Return what an executor is told of a file that it names."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return not_found(f"path: {text!r} is not a file in the work directory: write the file first")
    if isinstance(error, IrregularFileError):
        if error.kind == "a folder":
            return not_found(f"path: {text!r} is a folder: name a file in the work directory")
        return bad_request(f"path: {text!r} is {error.kind}: name a regular file of its own")
    return _path_error(text, error)


def _folder_error(text: str, error: OSError) -> BridgeError:
    """Return what an executor is told of a folder that it names, or of a file that is to be put there."""
    if isinstance(error, IsADirectoryError):
        return bad_request(f"path: {text!r} is a folder, and a file is needed: name another path")
    if isinstance(error, FileExistsError | NotADirectoryError):
        return bad_request(f"path: {text!r} is a file, and a folder is needed: name another path")
    return _path_error(text, error)


def _path_error(text: str, error: OSError) -> BridgeError:
    """Return what an executor is told of a path that cannot be used."""
    if isinstance(error, LinkInPathError):
        return bad_request(
            f"path: {text!r} leads through a symbolic link, perhaps out of the work directory: name another"
        )
    return bad_request(f"path: {text!r} cannot be used: {error.strerror}")
