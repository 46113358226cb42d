"""Opening files and folders beneath an open folder, never through a symbolic link.

A job may replace any part of a path between a check and its use. Here a path is resolved once, by the kernel
(`openat2(2)` with ``RESOLVE_BENEATH``) or part by part with ``O_NOFOLLOW``, and everything else goes by descriptor.
Called by `job_files`, `connectors` and `tasks`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

_OPENAT2: Final = 437
"""Number of the system call, the same on all architectures that Linux has got since it exists (5.6)."""
_RESOLVE: Final = 0x02 | 0x04 | 0x08
"""``RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH``."""
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG})
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


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


OpenFolder = Callable[[int, str, int], int]
"""Opens the folder at a relative path beneath an open one, with an access mode; raises `OSError`."""


def open_by_openat2(folder: int, path: str, access: int) -> int:
    """Open a folder with one system call; the kernel resolves the path."""
    how = _OpenHow(access | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE)
    number = _libc().syscall(_OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if number < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return int(number)


def open_by_parts(folder: int, path: str, access: int) -> int:
    """Open a folder part by part, for systems without `openat2` and for paths that are too long for it."""
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
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(current)
        current = inner
    return current


def _raise_if_link(folder: int, name: str, path: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def find_opener() -> OpenFolder:
    """Return `open_by_openat2` where the system has it, tried once, else `open_by_parts`."""
    if os.uname().sysname != "Linux":
        return open_by_parts
    root = os.open("/", _SEARCH | _FOLDER)
    try:
        os.close(open_by_openat2(root, ".", _SEARCH))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return open_by_parts
    finally:
        os.close(root)
    return open_by_openat2


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


def _open_folder(root: int, path: str, access: int) -> int:
    try:
        try:
            return find_opener()(root, path, access)
        except OSError as error:
            if error.errno not in (errno.ENAMETOOLONG, errno.EAGAIN):  # a long path, a race in the kernel
                raise
        return open_by_parts(root, path, access)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LinkInPathError(path) from None
        raise


@contextmanager
def make_folder(root: int, path: PurePosixPath, owner: int | None = None) -> Iterator[int]:
    """Open the folder at `path` as `open_folder` does; create what is missing of it, with mode 0700.

    Args:
        root: the open folder.
        path: relative path.
        owner: user whom new folders are given to, if not this one.

    Raises:
        LinkInPathError, OSError: see `open_folder`.
    """
    with _existing_folder(root, path) as (current, missing):
        opened = [os.dup(current)]
        try:
            for name in missing:
                opened.append(_make_one_folder(opened[-1], name, owner, str(path)))
            yield opened[-1]
        finally:
            for descriptor in opened:
                os.close(descriptor)


@contextmanager
def _existing_folder(root: int, path: PurePosixPath) -> Iterator[tuple[int, Sequence[str]]]:
    """Open the innermost existing folder of a path; yield it and the names of those that are missing."""
    for count in range(len(path.parts), 0, -1):
        try:
            with open_folder(root, "/".join(path.parts[:count])) as found:
                yield found, path.parts[count:]
                return
        except FileNotFoundError:
            continue
    yield root, path.parts


def _make_one_folder(parent: int, name: str, owner: int | None, path: str) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        owner = None  # somebody was faster
    try:
        descriptor = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        _raise_if_link(parent, name, path)
        raise
    if owner is not None and os.fstat(descriptor).st_uid == os.geteuid():
        os.fchown(descriptor, owner, owner)  # a folder has no hard links: this is the new one, or of this user
    return descriptor


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
    with open_folder(root, _parent_text(path)) as parent:
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
    folder = os.open(path.parent, _SEARCH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_regular(folder, PurePosixPath(path.name), links=None)
    finally:
        os.close(folder)


def _parent_text(path: PurePosixPath) -> str:
    return "" if len(path.parts) < 2 else str(path.parent)


def _check_regular(about: os.stat_result, path: PurePosixPath, links: int | None) -> None:
    if (kind := irregular_kind(about, links)) is not None:
        raise IrregularFileError(str(path), kind)


def irregular_kind(about: os.stat_result, links: int | None = 1) -> str | None:
    """Return what something is that is not a regular file with at most so many names; None for one that is."""
    if not stat.S_ISREG(about.st_mode):
        return next((text for matches, text in _KINDS if matches(about.st_mode)), "a special file")
    if links is not None and about.st_nlink > links:
        return f"a file with {about.st_nlink} hard links"
    return None


def walk(
    root: int, path: str = "", skip: Callable[[str], bool] = lambda _path: False
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of everything beneath a folder, outer folders first; what vanishes meanwhile is left out.

    Args:
        root: the open folder.
        path: folder beneath it to walk; yielded paths are relative to it.
        skip: whether to leave out a path, and what is beneath it.

    Raises:
        OSError: `path` itself is no folder, or one cannot be read.
    """
    with open_folder(root, path) as top:
        folders = [""]
        while folders:
            current = folders.pop()
            for name, about in _list(top, current):
                inner = f"{current}/{name}" if current else name
                if skip(inner):
                    continue
                if stat.S_ISDIR(about.st_mode):
                    folders.append(inner)
                yield inner, about


def _list(top: int, path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        with open_folder(top, path, os.O_RDONLY) as folder, os.scandir(folder) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield entry.name, about
    except (FileNotFoundError, NotADirectoryError, LinkInPathError):
        if not path:
            raise
