"""Resolving paths from executors and peers inside a job's work directory.

A job is confined to its work directory: absolute paths, ``..`` and symbolic links that lead out are refused. Used by
`connectors` and `bridge`.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Final

from hypha_worker.errors import bad_request, not_found

PATH_LIMIT: Final = 1024
"""Largest number of characters in a path."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def resolve_in_work_dir(work_dir: Path, text: str) -> Path:
    """Return the absolute path of `text` in the work directory; it need not exist.

    Raises:
        BridgeError: `text` is absolute, contains ``..``, or leads out through a symbolic link.
    """
    relative = check_relative(text)
    root = work_dir.resolve()
    path = (root / relative).resolve()
    if path != root and root not in path.parents:
        raise bad_request(f"path: {text[:80]!r} leads out of the work directory by a symbolic link: name another")
    return path


def resolve_file(work_dir: Path, text: str) -> Path:
    """Return the absolute path of an existing regular file in the work directory.

    Raises:
        BridgeError: as for `resolve_in_work_dir`, or there is no such file.
    """
    path = resolve_in_work_dir(work_dir, text)
    if not path.is_file():
        raise not_found(f"path: {text[:80]!r} is not a file in the work directory: write the file first")
    return path


def resolve_folder(work_dir: Path, text: str) -> Path:
    """Return the absolute path of a folder in the work directory; create it if it is missing.

    Raises:
        BridgeError: as for `resolve_in_work_dir`, or the path is an existing file.
    """
    path = resolve_in_work_dir(work_dir, text)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise bad_request(f"path: {text[:80]!r} is a file, and a folder is needed: name another path") from None
    return path


def check_relative(text: str) -> PurePosixPath:
    """Parse a relative path that does not leave its folder.

    Raises:
        BridgeError: it is absolute, contains ``..`` or a null byte, or is longer than `PATH_LIMIT`.
    """
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "\0" in text or len(text) > PATH_LIMIT:
        raise bad_request(
            f"path: {text[:80]!r} is not a relative path within the work directory: name one of at most {PATH_LIMIT} "
            "characters without a leading slash, '..' or null bytes"
        )
    return path


def relative_text(work_dir: Path, path: Path) -> str:
    """Return `path` relative to the work directory, as executors read it."""
    return path.relative_to(work_dir.resolve()).as_posix()


def safe_name(text: str) -> str:
    """Make a file name from a name that a peer or job chose: letters, digits and ``._-``, never hidden or empty."""
    return _UNSAFE.sub("-", text)[-100:].lstrip(".-") or "file"
