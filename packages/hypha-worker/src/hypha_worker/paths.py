"""Paths that executors and peers name, held within the work directory of their job. Touches the disk only to look."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Final

from hypha_worker.errors import bad_request, not_found

PATH_LIMIT: Final = 1024
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def resolve_in_work_dir(work_dir: Path, text: str) -> Path:
    """The place that `text` names in the work directory; it need not exist.

    Raises:
        BridgeError: `text` is absolute, climbs out, or leads out through a symbolic link.
    """
    relative = check_relative(text)
    root = work_dir.resolve()
    place = (root / relative).resolve()
    if place != root and root not in place.parents:
        raise bad_request(f"path {text[:80]!r} leads out of the work directory through a symbolic link")
    return place


def resolve_file(work_dir: Path, text: str) -> Path:
    """The existing regular file that `text` names in the work directory.

    Raises:
        BridgeError: as for `confine`, or there is no such file.
    """
    place = resolve_in_work_dir(work_dir, text)
    if not place.is_file():
        raise not_found(f"path {text[:80]!r} is no file in the work directory")
    return place


def resolve_folder(work_dir: Path, text: str) -> Path:
    """The folder that `text` names in the work directory, made if it is missing.

    Raises:
        BridgeError: as for `confine`, or a file is in the way.
    """
    place = resolve_in_work_dir(work_dir, text)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise bad_request(f"path {text[:80]!r} is a file where a folder is needed") from None
    return place


def check_relative(text: str) -> PurePosixPath:
    """A relative path without a way up.

    Raises:
        BridgeError: it is absolute, has ``..``, a null byte, or is too long.
    """
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "\0" in text or len(text) > PATH_LIMIT:
        raise bad_request(f"path {text[:80]!r} is not a relative path within the work directory")
    return path


def relative_text(work_dir: Path, place: Path) -> str:
    """The path of `place` relative to the work directory, as executors read it."""
    return place.relative_to(work_dir.resolve()).as_posix()


def safe_name(text: str) -> str:
    """A file name made from what a peer or job calls something: letters, digits, ``._-``; never hidden or empty."""
    return _UNSAFE.sub("-", text)[-100:].lstrip(".-") or "file"
