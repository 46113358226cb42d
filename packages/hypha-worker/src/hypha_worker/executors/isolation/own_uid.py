"""The layer `own-uid`: as root, the processes of each run belong to a user of their own.

The uid comes from a range that no user of the machine has. Its use is marked by a lock on a file that only root can
open; the lock ends with the worker, so that workers on one machine never share a uid. `bubblewrap` changes to the user
inside of its namespaces: outside, folders of root hide the program from other users. The run's folder, its bridge's
socket and the owner's ``writable`` paths appear there as the user's own, by idmapped mounts, and keep their owners
outside: the worker need not change owners, and the cache of one run is usable by the next, whose uid is another.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from hypha_worker.errors import ExecutionError
from hypha_worker.executors.isolation import launcher
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer

FIRST_UID: Final = 64000
COUNT: Final = 1000
"""Number of uids from `FIRST_UID` on that leases get."""
_MARKS: Final = Path("/run/hypha-uids")
"""Folder of the marks of uids in use, one for all workers on the machine."""
_PROBE_TIMEOUT: Final = 10.0


class OwnUidLayer(Layer):
    """See the module."""

    name = "own-uid"

    def __init__(self, folder: Path) -> None:
        """Prepare.

        Args:
            folder: where the folders of runs will be: its file system must have idmapped mounts.
        """
        self._folder = folder

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return Finding(False, "only a worker that root runs can give each lease a uid of its own")
        if (error := _try(self._folder)) is not None:
            return Finding(False, f"folders in {self._folder} cannot be given to another uid: {error}")
        try:
            _MARKS.mkdir(mode=0o700, exist_ok=True)
        except OSError as refused:
            return Finding(False, f"{_MARKS} cannot be made: {refused.strerror}")
        return Finding(True, f"each lease has one of the uids {FIRST_UID} to {FIRST_UID + COUNT - 1}")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[OwnUid]:
        """See `Layer.confine`.

        Raises:
            ExecutionError: all uids are in use, or cannot be marked.
        """
        changeable = _outermost([confinement.work_dir, confinement.socket_path, *confinement.writable])
        readable = [path for path in confinement.readable if not any(path.is_relative_to(each) for each in changeable)]
        reserved = _reserve_uid(changeable, _outermost(readable))
        with reserved.mark:
            yield reserved


@dataclass(frozen=True, slots=True)
class OwnUid(Confined):
    """A uid that no other run on this machine has."""

    uid: int
    mark: FileIO
    """Locked while it is open."""
    paths: Sequence[str]
    """What the run may change."""
    readable: Sequence[str]
    """What it may read as its owner could."""

    def apply(self, launch: Launch) -> None:
        """Change to the uid, which `bubblewrap` carries out, and let what the run may change be its own."""
        launch.steps["uid"] = self.uid
        launch.steps["owners"] = {"uid": self.uid, "paths": list(self.paths), "readable": list(self.readable)}


def _try(folder: Path) -> str | None:
    """Let another user create a file in a folder of the worker's; return why that does not work, or None."""
    if (program := shutil.which("setpriv")) is None:
        return "setpriv is not installed: install the package util-linux"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".hypha-probe-", dir=existing) as probed:
        steps = {"owners": {"uid": FIRST_UID, "paths": [probed], "readable": []}}
        # the folder is opened before the uid changes: those above it may be closed to others
        script = ["/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", probed]
        change = [program, f"--reuid={FIRST_UID}", f"--regid={FIRST_UID}", "--clear-groups", "touch", "file"]
        command = [*launcher.launcher_command(steps), *script, *change]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0 and (Path(probed) / "file").stat().st_uid == os.geteuid():
            return None
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _reserve_uid(paths: Sequence[Path], readable: Sequence[Path]) -> OwnUid:
    start = secrets.randbelow(COUNT)
    for offset in range(COUNT):
        uid = FIRST_UID + (start + offset) % COUNT
        if _is_users(uid):
            continue
        if (mark := _lock_mark(uid)) is None:
            continue
        return OwnUid(uid, mark, _existing(paths), _existing(readable))
    raise ExecutionError(f"all uids from {FIRST_UID} to {FIRST_UID + COUNT - 1} are in use on this machine")


def _lock_mark(uid: int) -> FileIO | None:
    try:
        mark = FileIO(os.open(_MARKS / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise ExecutionError(f"the use of a uid cannot be marked in {_MARKS}: {error.strerror}") from error
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark.close()
        return None
    return mark


def _existing(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths if path.exists()]


def _outermost(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if not any(other in path.parents for other in paths)]


def _is_users(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
