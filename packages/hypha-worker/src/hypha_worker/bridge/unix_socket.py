"""The Unix socket of a job's bridge: where it lies, and how it is created and removed.

It lies in the job's folder, where the documentation has it. Where its path would be too long for a socket, it lies in a
folder with a short path, and the job's folder has a link to it. A job may do with both what it likes: it harms only
itself, since the worker follows no link when it removes the socket.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha_net.local_socket import PATH_LIMIT
from hypha_worker.errors import ExecutionError

SOCKET_NAME: Final = "bridge.sock"
"""Name of the socket, or of the link to it, in the job's folder."""
_CREDENTIALS: Final = struct.Struct("3i")
"""``struct ucred`` of unix(7): process, user and group."""
BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted; with more, a client that does not block gets an error."""


class BridgeStartError(ExecutionError):
    """The bridge of a job could not be opened."""


@dataclass(frozen=True, slots=True)
class SocketPlace:
    """Where the socket of a bridge lies."""

    path: Path
    """The socket itself, which clients connect to."""
    link: Path | None = None
    """A link to it, if it lies elsewhere than in the job's folder."""


def choose_place(work_dir: Path, short_folder: Path) -> SocketPlace:
    """Return where the socket of a job is to lie.

    Args:
        work_dir: the job's folder.
        short_folder: a private folder whose path is short enough for sockets.
    """
    inside = work_dir / SOCKET_NAME
    if len(os.fsencode(inside)) <= PATH_LIMIT:
        return SocketPlace(inside)
    return SocketPlace(short_folder / f"{secrets.token_hex(4)}.sock", inside)


@contextmanager
def bind_socket(place: SocketPlace) -> Iterator[socket.socket]:
    """Create a socket that only its owner can open, and listen at it; remove it on exit.

    Called before a process of the job runs. The link is left to the removal of the job's folder.

    Raises:
        BridgeStartError: it cannot be created.
    """
    path = place.path
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise BridgeStartError(
            f"socket path {path} exceeds the system's limit of {PATH_LIMIT} bytes: set TMPDIR to a shorter folder"
        )
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _start_error(path, error) from error
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _listen(listener, place)
            try:
                yield listener
            finally:
                with suppress(OSError):  # the job has removed it, or put something else there: its folder is removed
                    os.unlink(path.name, dir_fd=folder)
    finally:
        os.close(folder)


def peer_pid(connection: socket.socket) -> int | None:
    """Return the process that has connected; 0 outside of this one's namespace, None where the system does not say."""
    if sys.platform != "linux":
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def _listen(listener: socket.socket, place: SocketPlace) -> None:
    try:
        listener.bind(str(place.path))
        place.path.chmod(0o600)
        listener.listen(BACKLOG)
        if place.link is not None:
            place.link.symlink_to(place.path)
    except OSError as error:
        raise _start_error(place.path, error) from error


def _start_error(path: Path, error: OSError) -> BridgeStartError:
    return BridgeStartError(f"socket {path}: {error.strerror}")
