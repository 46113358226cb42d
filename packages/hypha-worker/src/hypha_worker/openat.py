"""Opening files and folders beneath an open folder, never through a symbolic link.

A task may replace any part of a path between a check and its use. Here a path is resolved once, part by part with
``O_NOFOLLOW``, and everything else goes by descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEARCH: Final = getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder also where it may be searched and not read."""
_KINDS: Final = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class LinkInPathError(OSError):
    """A part of a path is a symbolic link."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "a part of the path is a symbolic link", path)


class IrregularFileError(OSError):
    """What a path names is no regular file with one name.

    Attributes:
        kind: what it is: ``a FIFO``, for example.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(errno.EINVAL, f"is {kind}", path)
        self.kind = kind


def _raise_if_link(folder: int, name: str, path: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise LinkInPathError(path)


@contextmanager
def open_root(folder: Path, access: int = os.O_RDONLY) -> Iterator[int]:
    """Open a folder by its path while the context is open, to open what is beneath it.

    Raises:
        OSError: there is no such folder, or it cannot be opened.
    """
    descriptor = os.open(folder, access | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_folder(root: int, path: str, access: int = _SEARCH) -> Iterator[int]:
    """Open the folder at `path` beneath `root` while the context is open; the empty path is `root` itself.

    Raises:
        LinkInPathError: a part of the path is a symbolic link.
        OSError: there is no such folder, or it cannot be opened.
    """
    descriptor = _open_folder(root, path or ".", access)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(folder: int, path: str, access: int) -> int:
    """Open the folder at a relative path beneath an open one. Raises `OSError`, as `open_folder` does."""
    parts = PurePosixPath(path).parts
    if ".." in parts or path.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    current = os.open(".", access | _FOLDER, dir_fd=folder)
    for index, part in enumerate(parts):
        try:
            inner = os.open(part, (access if index == len(parts) - 1 else _SEARCH) | _FOLDER, dir_fd=current)
        except NotADirectoryError as error:
            _raise_if_link(current, part, path)
            raise NotADirectoryError(error.errno, error.strerror, path) from None
        except OSError as error:
            if error.errno == errno.ELOOP:  # what other systems than Linux say of a link
                raise LinkInPathError(path) from None
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(current)
        current = inner
    return current


@contextmanager
def make_folder(root: int, path: PurePosixPath) -> Iterator[int]:
    """Open the folder at `path` as `open_folder` does; create what is missing of it, with mode 0700.

    Args:
        root: the open folder.
        path: relative path.

    Raises:
        LinkInPathError, OSError: see `open_folder`.
    """
    current, missing = _open_existing(root, path)
    try:
        for name in missing:
            inner = _make_one_folder(current, name, str(path))
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


def _open_existing(root: int, path: PurePosixPath) -> tuple[int, Sequence[str]]:
    """Open the innermost existing folder of a path; return it and the names of those that are missing."""
    for count in range(len(path.parts), 0, -1):
        try:
            return _open_folder(root, "/".join(path.parts[:count]), _SEARCH), path.parts[count:]
        except FileNotFoundError:
            continue
    return os.dup(root), path.parts


def _make_one_folder(parent: int, name: str, path: str) -> int:
    with suppress(FileExistsError):  # somebody was faster
        os.mkdir(name, 0o700, dir_fd=parent)
    try:
        return os.open(name, _SEARCH | _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        _raise_if_link(parent, name, path)
        raise


def open_regular(root: int, path: PurePosixPath, *, links: int | None = 1) -> FileIO:
    """Open a regular file for reading; never wait for one that is none.

    Args:
        root: the open folder.
        path: relative path of the file.
        links: largest number of names (hard links) that it may have.

    Raises:
        LinkInPathError: a folder in the path is a symbolic link.
        IrregularFileError: it is no regular file, or has more names.
        OSError: there is none, or it cannot be opened.
    """
    with open_folder(root, str(path.parent)) as parent:
        about = os.stat(path.name or ".", dir_fd=parent, follow_symlinks=False)
        _check_regular(about, path, links)  # before it is opened: to open a device may have an effect
        return _open_checked(parent, path, links)


def _open_checked(parent: int, path: PurePosixPath, links: int | None) -> FileIO:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = FileIO(os.open(path.name, flags, dir_fd=parent))
    except OSError as error:  # it was replaced meanwhile
        kind = {errno.ELOOP: "a symbolic link", errno.ENXIO: "a socket"}.get(error.errno or 0)
        raise error if kind is None else IrregularFileError(str(path), kind) from None
    try:
        _check_regular(os.fstat(file.fileno()), path, links)
    except BaseException:
        file.close()
        raise
    return file


def open_regular_path(path: Path) -> FileIO:
    """Open a regular file of this process's own folders, as `open_regular` does with any number of names."""
    with open_root(path.parent, _SEARCH) as folder:
        return open_regular(folder, PurePosixPath(path.name), links=None)


def _check_regular(about: os.stat_result, path: PurePosixPath, links: int | None) -> None:
    if (kind := irregular_kind(about, links)) is not None:
        raise IrregularFileError(str(path), kind)


def irregular_kind(about: os.stat_result, links: int | None = 1) -> str | None:
    """Return what something is, such as "a FIFO", unless it is a regular file with at most `links` names."""
    if not stat.S_ISREG(about.st_mode):
        return next((text for matches, text in _KINDS if matches(about.st_mode)), "a special file")
    if links is not None and about.st_nlink > links:
        return f"a file with {about.st_nlink} hard links"
    return None


def walk(
    root: int, path: str = "", skip: Callable[[str], bool] = lambda _path: False
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of everything beneath a folder, outer folders first; what vanishes meanwhile is left out.

    Goes into each folder from the one around it, and back by ``..``, so that neither the number of open files nor the
    time grows with the depth.

    Args:
        root: the open folder.
        path: folder beneath it to walk; yielded paths are relative to it.
        skip: whether to leave out a path, and what is beneath it.

    Raises:
        OSError: `path` itself is no folder, or one cannot be read.
    """
    with open_folder(root, path, os.O_RDONLY) as top:
        tree = _Tree(top)
        try:
            yield from tree.list(skip)
            while tree.go_on():
                yield from tree.list(skip)
        finally:
            tree.close()


@dataclass(slots=True)
class _Level:
    """A folder on the way from the top of a tree to the one that is open."""

    identity: tuple[int, int]
    """Device and inode."""
    name: str = ""
    folders: list[str] = field(default_factory=list)
    """Names of those in it that are still to be walked."""


class _Tree:
    """The walk of one tree: the open folder, and what is left to do in those around it."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._current = os.dup(top)
        self._prefix = ""
        """Path of the open folder with a slash at its end; empty at the top."""
        self._levels = [_Level(_identity(top))]

    def close(self) -> None:
        os.close(self._current)

    def list(self, skip: Callable[[str], bool]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield what is in the open folder."""
        prefix = self._prefix
        with os.scandir(self._current) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if skip(prefix + entry.name):
                    continue
                if stat.S_ISDIR(about.st_mode):
                    self._levels[-1].folders.append(entry.name)
                yield prefix + entry.name, about

    def go_on(self) -> bool:
        """Open the next folder; return False if there is none."""
        while self._levels:
            if not self._levels[-1].folders:
                self._go_up()
            elif self._go_into(self._levels[-1].folders.pop()):
                return True
        return False

    def _go_into(self, name: str) -> bool:
        try:
            inner = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=self._current)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:  # what other systems than Linux say of a link
                return False
            raise
        self._replace(inner)
        self._prefix += f"{name}/"
        self._levels.append(_Level(_identity(inner), name))
        return True

    def _go_up(self) -> None:
        """Open the folder around this one; if it was moved meanwhile, the one that has its path now."""
        left = self._levels.pop()
        if not self._levels:
            return
        self._prefix = self._prefix[: -len(left.name) - 1]
        outer = os.open("..", os.O_RDONLY | _FOLDER, dir_fd=self._current)
        if _identity(outer) == self._levels[-1].identity:
            self._replace(outer)
            return
        os.close(outer)
        try:
            self._replace(_open_folder(self._top, self._prefix, os.O_RDONLY))
        except OSError:  # it is gone, and so is what was left to do in it
            self._levels[-1].folders.clear()

    def _replace(self, descriptor: int) -> None:
        os.close(self._current)
        self._current = descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino
