"""Files and directories that appear completely written, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; at the end it is synced to disk and takes the place of `path`.

    After an error the new directory is removed, and `path` is unchanged unless only the last sync failed. If the
    program is killed, `path` is complete or absent; the next call for `path` removes temporary files beside it.

    Raises:
        OSError: it cannot be created, synced or moved.
    """
    part = path.with_name(f".{path.name}.part")
    remove_tree(part)
    try:
        _make_parents(part.parent)
        part.mkdir()
        yield part
        sync_tree(part)
        remove_tree(path)
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    try:
        sync(path.parent)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file that is complete if it exists, also after a power failure; it takes the place of `path`.

    Raises:
        OSError: it cannot be written, synced or moved.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory or file, if it exists.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def sync_tree(path: Path) -> None:
    """Sync a directory and all that it contains to disk.

    Raises:
        OSError: a file cannot be synced.
    """
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def sync(path: Path) -> None:
    """Sync one file, or the entries of one directory, to disk.

    Raises:
        OSError: it cannot be synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_parents(folder: Path) -> None:
    """Create a directory and its parents, with their entries on disk."""
    if folder.is_dir():
        return
    _make_parents(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)
