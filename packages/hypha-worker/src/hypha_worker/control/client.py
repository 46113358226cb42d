"""Control client: sends commands to a running worker on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from hypha_net.local_socket import send_request
from hypha_proto.codec import parse_json

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
    with _send(path, {command: {}}) as connection, connection.makefile("rb") as lines:
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
    with _send(path, {"drain": {"timeout": timeout}}) as connection, connection.makefile("rb") as lines:
        yield from _drain_answers(connection, lines)


def _send(path: Path, request: Mapping[str, Any]) -> socket.socket:
    try:
        return send_request(path, request)
    except OSError as error:
        raise NoWorkerError(
            f"the worker does not run, or has not started yet: no worker listens at {path}: "
            f"{error.strerror or error}; hypha-worker probe with its --config tells what prevents a start"
        ) from None


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
