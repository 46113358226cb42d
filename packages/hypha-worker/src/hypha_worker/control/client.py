"""Control client: sends commands to a running worker on this machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from hypha_net.unix_socket_path import shortened
from hypha_proto.codec import parse_json

_CONNECT_TIMEOUT: Final = 5.0
_ANSWER_TIMEOUT: Final = 30.0
_END_TIMEOUT: Final = 30.0
"""Seconds beyond its drain that a worker may take to end its jobs' processes and answer."""


class NoWorkerError(Exception):
    """No worker listens at the socket."""


class CommandFailedError(Exception):
    """The worker refused a command, or ended before it had answered."""


def ask_worker(path: Path, command: str) -> dict[str, Any]:
    """Send a command that has no arguments and one answer; return the answer.

    Args:
        path: control socket of the worker.
        command: its name.

    Raises:
        NoWorkerError: no worker listens at `path`.
        CommandFailedError: it refused, or ended before it had answered.
    """
    with _sent(path, {command: {}}) as (connection, lines):
        connection.settimeout(_ANSWER_TIMEOUT)
        try:
            line = lines.readline()
        except OSError as error:
            raise CommandFailedError(f"the worker did not answer: {error.strerror or error}") from None
        if not line:
            raise CommandFailedError("the worker ended before it answered; its log says why")
        return _checked(line)


def drain_worker(path: Path, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Drain a worker and yield its answers: what it drains, and what was cancelled at the end.

    Args:
        path: control socket of the worker.
        timeout: seconds that its jobs have to end; None for the worker's ``drain_timeout``.

    Raises:
        NoWorkerError: no worker listens at `path`.
        CommandFailedError: it refused, or ended before it had answered.
    """
    with _sent(path, {"drain": {"timeout": timeout}}) as (connection, lines):
        yield from _drain_answers(connection, lines)


@contextmanager
def _sent(path: Path, request: Mapping[str, Any]) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """Connect and send a request; the context has the connection, and its answers as lines."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        try:
            with shortened(path) as short:
                connection.connect(str(short))
            with suppress(BrokenPipeError, ConnectionResetError):  # it has answered before the request, and refused it
                connection.sendall(json.dumps(request).encode())
                connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise NoWorkerError(
                f"the worker does not run, or has not started yet: no worker listens at {path}: "
                f"{error.strerror or error}; hypha-worker probe with its --config tells what prevents a start"
            ) from None
        with connection.makefile("rb") as lines:
            yield connection, lines


def _checked(line: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = parse_json(line)
    if "error" in answer:
        raise CommandFailedError(str(answer["error"]))
    return answer


def _drain_answers(connection: socket.socket, lines: BinaryIO) -> Iterator[dict[str, Any]]:
    answer: dict[str, Any] = {}
    with suppress(ConnectionError, TimeoutError):
        for line in lines:
            answer = _checked(line)
            yield answer
            if "drained" in answer:
                return
            connection.settimeout(float(answer["seconds"]) + _END_TIMEOUT)
    when = "it was drained" if answer else "it answered"
    raise CommandFailedError(f"the worker ended before {when}; its log says why")
