"""Paths of Unix sockets that are longer than the system allows: 107 bytes on Linux.

For such a path the folder is opened, and the socket gets a path in ``/proc/self/fd``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PATH_LIMIT: Final = 107
"""Largest number of bytes in a Unix socket's path (Linux)."""


@contextmanager
def shortened(path: Path) -> Iterator[Path]:
    """Yield a path by which a socket can be bound or connected to, as long as the context lasts.

    Raises:
        OSError: the path is too long, and its folder cannot be opened.
    """
    if len(os.fsencode(path)) <= PATH_LIMIT:
        yield path
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
