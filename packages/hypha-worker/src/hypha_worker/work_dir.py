"""The folders that a worker keeps jobs and sockets in: preparing, locking and clearing them. Called by `service`."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

SOCKET_FOLDER_LIMIT: Final = 90
"""Bytes of the folder's path that leave enough space for the name of a socket."""
_JOB_FOLDER: Final = re.compile(r"(hypha|outputs)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def prepare_work_dir(folder: Path) -> None:
    """Create the work directory if it is missing; warn if other users may read it.

    Raises:
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & ~0o750:
        _log.warning("work_dir %s has mode %04o, wider than 0750: run chmod 750 %s", folder, mode, folder)


def clear_work_dir(folder: Path, stack: ExitStack) -> None:
    """Remove folders of jobs and outputs left by a killed worker, unless another worker uses the work directory.

    The folder stays locked until `stack` is closed, so that no other worker removes this one's jobs.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in [path for path in folder.iterdir() if _JOB_FOLDER.fullmatch(path.name)]:
            _log.warning("removing %s, left by a worker that was killed", path)
            remove_folder(path)
    except BlockingIOError:
        _log.info("work_dir %s is used by another worker: job folders of killed workers are not removed", folder)
    except OSError as error:
        _log.warning("work_dir %s cannot be locked, job folders of killed workers are not removed: %s", folder, error)
        return
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def remove_folder(folder: Path) -> None:
    """Remove as much of a folder as possible; log a warning if something of it stays."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        _log.warning("%s cannot be removed completely; remove it by hand, it takes up disk space: %s", folder, error)


@contextmanager
def open_socket_folder() -> Iterator[Path]:
    """Create a private folder whose path is short enough for Unix sockets; remove it on exit."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > SOCKET_FOLDER_LIMIT - len("/hypha-12345678"):
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix="hypha-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
