"""Control client: asks a running worker on this machine to drain. Called by `cli`."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json

_CONNECT_TIMEOUT: Final = 5.0
_END_TIMEOUT: Final = 30.0
"""Seconds beyond its drain that a worker may take to end its jobs' processes and answer."""


class NoWorkerError(Exception):
    """No worker listens at the socket."""


class DrainFailedError(Exception):
    """The worker refused to drain, or ended before its drain did."""


def drain_worker(path: Path, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Drain a worker and yield its answers: what it drains, and what was cancelled at the end.

    Args:
        path: control socket of the worker.
        timeout: seconds that its jobs have to end; None for the worker's ``drain_timeout``.

    Raises:
        NoWorkerError: no worker listens at `path`.
        DrainFailedError: it refused, or ended before it had answered.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"drain": {"timeout": timeout}}).encode())
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise NoWorkerError(f"no worker listens at {path}: {error.strerror or error}") from None
        with connection.makefile("rb") as lines:
            yield from _answers(connection, lines)


def _answers(connection: socket.socket, lines: Any) -> Iterator[dict[str, Any]]:
    answer: dict[str, Any] = {}
    with suppress(ConnectionError, TimeoutError):
        for line in lines:
            answer = parse_json(line)
            if "error" in answer:
                raise DrainFailedError(str(answer["error"]))
            yield answer
            if "drained" in answer:
                return
            connection.settimeout(float(answer["seconds"]) + _END_TIMEOUT)
    when = "it was drained" if answer else "it answered"
    raise DrainFailedError(f"the worker ended before {when}; its log says why")
