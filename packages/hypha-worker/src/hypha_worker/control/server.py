"""Control server: commands of the worker's owner, over a Unix socket in a private folder that no sandbox shows.

A connection carries one JSON object with one key, the command, such as ``{"drain": {"timeout": seconds or null}}``. It
is answered by JSON lines; ``{"error": …}`` says why there is no other answer. A client that is slow, or one of many,
keeps no other one waiting.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net.local_socket import accept_clients, listen, send_answer
from hypha_proto.codec import parse_json
from hypha_worker.bridge.unix_socket import peer_pid
from hypha_worker.work_dir import control_folder, prepare_control_folder

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "worker.sock"
MAX_READING: Final = 64
"""Clients that have not sent their request yet; the oldest gives way to a further one."""
MAX_ANSWERING: Final = 32
"""Clients whose command runs, such as those that wait for the end of a drain; further ones are refused."""
_MAX_REQUEST: Final = 4096
"""Bytes of a request."""
_READ_TIMEOUT: Final = 10.0

Answer = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends one answer to the client; a client that has disconnected is no error."""
Command = Callable[[Mapping[str, Any], Answer], Awaitable[None]]
"""Runs one command with its arguments. Raises `ValueError` if they are wrong, `OSError` if it cannot be done."""
_RESTRICTIONS: Final = re.compile(r"^(?:NoNewPrivs|Seccomp|Seccomp_filters):\s*(\d+)", re.MULTILINE)


def socket_path(work_dir: Path) -> Path:
    """Return the control socket of a worker with this work directory."""
    return control_folder(work_dir) / SOCKET_NAME


@dataclass(slots=True)
class ControlServer:
    """Takes commands for one worker."""

    work_dir: Path
    commands: Mapping[str, Command]
    """What clients may ask for, by name."""
    _reading: dict[anyio.abc.SocketStream, anyio.CancelScope] = field(default_factory=dict)
    """Clients that have not sent their request yet, the oldest first."""
    _answering: int = 0

    async def serve(self) -> None:
        """Take commands until cancelled; return with a warning if there can be no socket."""
        path = socket_path(self.work_dir)
        remedy = "another worker uses this work_dir; give each worker one of its own"
        async with AsyncExitStack() as stack:
            try:
                prepare_control_folder(self.work_dir)
                listener = await stack.enter_async_context(listen(path, remedy))
            except OSError as error:
                _log.warning("hypha-worker drain cannot reach this worker, SIGTERM drains it: %s: %s", path, error)
                return
            tasks = await stack.enter_async_context(anyio.create_task_group())
            await accept_clients(listener, partial(self._take, tasks))

    def _take(self, tasks: anyio.abc.TaskGroup, stream: anyio.abc.SocketStream) -> None:
        if len(self._reading) >= MAX_READING:
            self._reading.pop(next(iter(self._reading))).cancel()
        scope = self._reading[stream] = anyio.CancelScope()
        tasks.start_soon(self._handle, stream, scope)

    async def _handle(self, stream: anyio.abc.SocketStream, scope: anyio.CancelScope) -> None:
        async with stream:
            data: bytes | None = None
            try:
                with scope, anyio.move_on_after(_READ_TIMEOUT):
                    data = await _read(stream)
            except (ValueError, anyio.BrokenResourceError) as error:
                await send_answer(stream, {"error": str(error) or "the client has disconnected"})
                return
            finally:
                self._reading.pop(stream, None)
            if data is not None:
                await self._run(stream, data)
            elif not scope.cancel_called:
                await send_answer(stream, {"error": f"no request was received within {_READ_TIMEOUT:g} s"})

    async def _run(self, stream: anyio.abc.SocketStream, data: bytes) -> None:
        answer = partial(send_answer, stream)
        if self._answering >= MAX_ANSWERING:
            await answer({"error": f"{MAX_ANSWERING} other clients wait for an answer: end some of them"})
            return
        self._answering += 1
        try:
            if is_confined(stream):
                _log.warning("a confined process, such as a job's, tried to control this worker and was refused")
                raise ValueError("a process in a sandbox may not control the worker: run the command outside of it")
            command, arguments = self._parse(data)
            await command(arguments, answer)
        except (ValueError, OSError) as error:
            await answer({"error": str(error)})
        finally:
            self._answering -= 1

    def _parse(self, data: bytes) -> tuple[Command, Mapping[str, Any]]:
        name, arguments = parse_request(data)
        if name not in self.commands:
            raise ValueError(f"no such command: {name!r}; there are {', '.join(sorted(self.commands))}")
        return self.commands[name], arguments


async def _read(stream: anyio.abc.SocketStream) -> bytes:
    data = b""
    while len(data) <= _MAX_REQUEST:
        try:
            data += await stream.receive()
        except anyio.EndOfStream:
            return data
    raise ValueError(f"the request is larger than {_MAX_REQUEST} bytes")


def parse_request(data: bytes) -> tuple[str, Mapping[str, Any]]:
    """Return the command and the arguments of a request.

    Raises:
        ValueError: it is no request.
    """
    found = parse_json(data)
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError('expected an object with one command, such as {"status": {}}')
    [(name, arguments)] = found.items()
    if not isinstance(arguments, dict):
        raise ValueError(f"{name!r}: expected an object with its arguments")
    return name, arguments


def is_confined(stream: anyio.abc.SocketStream) -> bool:
    """Return whether a client is more confined than this process; False where the system does not say.

    The layer `landlock` refuses files, not connections to sockets. What it has confined can be told by its
    ``no_new_privs`` and its filters of system calls, which all its descendants keep.
    """
    pid = peer_pid(stream.extra(anyio.abc.SocketAttribute.raw_socket))
    if not pid:  # the system does not say, or it is outside of this one's namespace, which no process of a job leaves
        return False
    try:
        restrictions = _read_restrictions(f"/proc/{pid}/status")
    except OSError:  # it has ended: nobody waits for an answer
        return True
    own = _read_restrictions("/proc/self/status")
    return any(theirs > ours for theirs, ours in zip(restrictions, own, strict=True))


def _read_restrictions(status: str) -> list[int]:
    return [int(value) for value in _RESTRICTIONS.findall(Path(status).read_text())]
