"""Names and paths that executors and peers choose: which of them stay inside a task's folder. Pure.

Whether a part of such a path is a symbolic link is known only when it is opened: see `openat`.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Final

from hypha_worker.errors import bad_request

PATH_LIMIT: Final = 1024
"""Largest number of characters in a path."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


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


def safe_name(text: str) -> str:
    """Make a file name from a name that a peer or task chose: letters, digits and ``._-``, never hidden or empty."""
    return _UNSAFE.sub("-", text)[-100:].lstrip(".-") or "file"
