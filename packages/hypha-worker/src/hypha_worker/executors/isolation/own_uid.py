"""The layer `own-uid`: as root, the processes of each run belong to a user of their own.

The uid comes from a range that no user of the machine has. Its use is marked by an abstract Unix socket, which ends
with the worker, so that workers on one machine never share one. `bubblewrap` changes to the user inside of its
namespaces: outside, folders of root hide the program from other users.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.to_thread

from hypha_worker.errors import ExecutionError
from hypha_worker.executors.isolation.layers import Confinement, Finding, Launch

FIRST_UID: Final = 64000
COUNT: Final = 1000
"""Number of uids from `FIRST_UID` on that leases get."""
_PROBE_TIMEOUT: Final = 10.0


class OwnUidLayer:
    """See the module."""

    name = "own-uid"

    def __init__(self, probe_bubblewrap: Callable[[], Finding]) -> None:
        """Prepare.

        Args:
            probe_bubblewrap: the probe of the layer that this one needs.
        """
        self._probe_bubblewrap = probe_bubblewrap

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return Finding(False, "only a worker that root runs can give each lease a uid of its own")
        if not self._probe_bubblewrap().works:
            return Finding(False, "it needs the layer bubblewrap")
        if (error := _try_setpriv()) is not None:
            return Finding(False, f"setpriv (util-linux) cannot change the uid: {error}")
        return Finding(True, f"each lease has one of the uids {FIRST_UID} to {FIRST_UID + COUNT - 1}")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[OwnUid]:
        """See `Layer.confine`.

        Raises:
            ExecutionError: all uids are in use.
        """
        reserved = _reserve_uid()
        with reserved.mark:
            await anyio.to_thread.run_sync(_give, confinement, reserved.uid)
            yield reserved

    def sweep(self) -> None:
        """Marks end with the worker."""


@dataclass(frozen=True, slots=True)
class OwnUid:
    """A uid that no other run on this machine has."""

    uid: int
    mark: socket.socket

    def apply(self, launch: Launch) -> None:
        """Change to the uid; `bubblewrap` carries it out."""
        launch.steps["uid"] = self.uid

    def pids(self) -> None:
        """Return None: other layers know the processes."""
        return

    def kill(self) -> bool:
        """Return False: other layers end the processes."""
        return False

    def describe_end(self, exit_code: int) -> str | None:
        """Return None: a uid ends no process."""
        return None


def _try_setpriv() -> str | None:
    if (program := shutil.which("setpriv")) is None:
        return "it is not installed"
    command = [program, f"--reuid={FIRST_UID}", f"--regid={FIRST_UID}", "--clear-groups", "/bin/sh", "-c", "id -u"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.stdout.strip() == str(FIRST_UID) else done.stderr.strip() or "it has not done so"


def _reserve_uid() -> OwnUid:
    start = secrets.randbelow(COUNT)
    for offset in range(COUNT):
        uid = FIRST_UID + (start + offset) % COUNT
        if _is_users(uid):
            continue
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0hypha-uid-{uid}")
        except OSError:
            mark.close()
            continue
        return OwnUid(uid, mark)
    raise ExecutionError(f"all uids from {FIRST_UID} to {FIRST_UID + COUNT - 1} are in use on this machine")


def _is_users(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _give(confinement: Confinement, uid: int) -> None:
    """Make the run's user the owner of its folder, of what the worker has put there, and of its bridge's socket."""
    for descriptor in _entries(confinement.work_dir):
        os.fchown(descriptor, uid, uid)
    with suppress(FileNotFoundError):  # a runner without a bridge
        os.chown(confinement.socket_path, uid, uid, follow_symlinks=False)


def _entries(folder: Path) -> Iterator[int]:
    """Open a folder and everything in it, one after the other, following no links. No process of the run exists yet."""
    for _path, folders, files, descriptor in os.fwalk(folder, follow_symlinks=False):
        yield descriptor
        for name in files:
            with suppress(OSError):  # a symbolic link; sockets and FIFOs are not opened
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
                try:
                    yield opened
                finally:
                    os.close(opened)
        folders.sort()
