"""Unix sockets that only their owner can open, by paths of any length: one JSON request, which JSON lines answer.

A path may have 107 bytes on Linux. For a longer one the folder is opened, and the socket gets a path in
``/proc/self/fd``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net.log_throttle import LogThrottle

_log = logging.getLogger(__name__)

PATH_LIMIT: Final = 107
"""Largest number of bytes in a Unix socket's path (Linux)."""
_CONNECT_TIMEOUT: Final = 5.0
_SEND_TIMEOUT: Final = 10.0
"""Seconds for a client to take an answer."""
_ACCEPT_PAUSE: Final = 0.5
"""Seconds after a client could not be accepted until the next one is, for instance when no file may be opened."""


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


def send_request(path: Path, request: Mapping[str, Any]) -> socket.socket:
    """Connect to a server and send it a request; return the connection, from which the answers are read.

    Raises:
        OSError: nothing listens at `path`, or it does not take the request.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_TIMEOUT)
        with shortened(path) as short:
            connection.connect(str(short))
        with suppress(BrokenPipeError, ConnectionResetError):  # it has answered before the request, and refused it
            connection.sendall(json.dumps(request, default=str).encode())  # dates become text
            connection.shutdown(socket.SHUT_WR)
    except BaseException:
        connection.close()
        raise
    return connection


@asynccontextmanager
async def listen(path: Path, remedy: str) -> AsyncIterator[anyio.abc.SocketListener]:
    """Listen at a socket while the context is open; one that a killed process has left is replaced.

    Raises:
        OSError: there can be no socket, or another process listens at it; then the error ends with `remedy`.
    """
    await _check_free(path, remedy)
    final, temporary = anyio.Path(path), anyio.Path(path.with_suffix(".new"))
    try:
        with shortened(Path(temporary)) as short:
            listener = await anyio.create_unix_listener(short, mode=0o600)
        async with listener:
            await temporary.replace(final)  # now that it listens: clients which find it can connect
            yield listener
    finally:
        with anyio.CancelScope(shield=True):
            for left in (temporary, final):
                await left.unlink(missing_ok=True)


async def _check_free(path: Path, remedy: str) -> None:
    try:
        with shortened(path) as short:
            async with await anyio.connect_unix(short):
                raise OSError(errno.EADDRINUSE, remedy, str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return


async def accept_clients(listener: anyio.abc.SocketListener, take: Callable[[anyio.abc.SocketStream], object]) -> None:
    """Pass on clients until cancelled, also after one could not be accepted."""
    failures = LogThrottle()
    while True:
        try:
            client = await listener.accept()
        except (OSError, anyio.BrokenResourceError) as error:  # on trio, anyio raises the second from the first
            reason = error if isinstance(error, OSError) else error.__cause__ or error
            failures.log(_log, logging.WARNING, str(reason), "clients cannot be accepted: %s", reason)
            await anyio.sleep(_ACCEPT_PAUSE)
        else:
            take(client)


async def send_answer(client: anyio.abc.SocketStream, answer: Mapping[str, Any]) -> None:
    """Send one line; that a client has disconnected, or does not read, is no error."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(_SEND_TIMEOUT):
        await client.send(json.dumps(answer).encode() + b"\n")
