"""The HTTP server of a job bridge: uvicorn in a thread of its own, which ends as soon as it is told to.

Imported when a bridge is first used, since uvicorn takes a while to import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hypha_proto.bridge_api import BridgeErrorBody
from hypha_proto.codec import to_json
from hypha_worker.bridge.unix_socket import peer_pid

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
"""Connections of one job, idle ones included; a further one is answered with 503 and closed."""
_ACCEPT_PAUSE: Final = 1.0
"""Seconds until the next attempt after this process has run out of file descriptors."""
_SHUTDOWN_GRACE: Final = 1
"""Seconds that requests get to finish when the bridge closes."""
_DISCONNECT_STEPS: Final = 5
"""Iterations of the event loop in which it learns that the clients of an ended process are gone."""


class _Connection(H11Protocol):
    """One connection; tells when it is closed."""

    def __init__(self, on_closed: Callable[[], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._on_closed = on_closed

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
        super().connection_lost(exc)
        self._on_closed()


class _Listener:
    """Accepts connections one by one, so that there are never more than the limit and one.

    asyncio accepts as many at once as its backlog holds, which a process of the job may fill within a moment.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], None]], H11Protocol],
        is_own: Callable[[int], bool],
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._is_own = is_own
        self._has_refused = False
        self._loop = asyncio.get_running_loop()
        self._open = 0
        self._accepting: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accept no further connection."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)

    def _start(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("the bridge of a job cannot accept a connection, trying again in %g s: %s", _ACCEPT_PAUSE, error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_PAUSE, self._start)
            return
        connection.setblocking(False)
        pid = peer_pid(connection)
        if pid is not None and not self._is_own(pid):
            self._log_foreign(pid)
            _refuse(connection, _FOREIGN)
            return
        if self._open >= MAX_CONNECTIONS:
            _refuse(connection, _TOO_MANY)
            return
        self._open += 1
        task = self._loop.create_task(self._connect(connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(self._on_closed), connection)
        except BaseException as error:
            self._on_closed()
            connection.close()
            if not isinstance(error, OSError):  # else the client has gone
                raise

    def _log_foreign(self, pid: int) -> None:
        if not self._has_refused:
            self._has_refused = True
            _log.warning("process %d is refused at the bridge of a job that it does not belong to", pid)

    def _on_closed(self) -> None:
        self._open -= 1


def _refuse(connection: socket.socket, answer: bytes) -> None:
    """Answer and close a connection. A new connection's buffer holds the answer."""
    with connection, suppress(OSError):
        connection.send(answer)


def _error_response(status: str, kind: str, detail: str) -> bytes:
    body = to_json(BridgeErrorBody, BridgeErrorBody(error=kind, detail=detail))
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return head.encode() + b"\r\n\r\n" + body


_TOO_MANY: Final = _error_response(
    "503 Service Unavailable",
    "too-many-connections",
    f"this job has {MAX_CONNECTIONS} connections to its bridge, the most it may have: close or reuse one",
)
_FOREIGN: Final = _error_response(
    "403 Forbidden",
    "foreign-process",
    "this bridge answers only the processes that its executor has started, which are its descendants or in its session "
    "or control group",
)


class HttpServer(uvicorn.Server):
    """A `uvicorn.Server` for one job: with few connections, and without uvicorn's delays at the end.

    uvicorn looks every 0.1 s whether it is to end, and then waits 0.1 s even if no client is connected; together they
    would take 0.2 s of every job that uses its bridge.
    """

    def __init__(self, app: Any, is_own: Callable[[int], bool]) -> None:
        """Make it.

        Args:
            app: the ASGI application.
            is_own: returns whether a process, by its id, belongs to the job; others are answered with 403.
        """
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # at INFO it logs every start and end
        logging.getLogger("uvicorn.error").addFilter(_is_not_shutdown_noise)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_GRACE,
            timeout_keep_alive=3600,
        )
        super().__init__(config)
        self._told_to_end: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_own = is_own
        self._listeners: list[_Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections at listening sockets."""
        await super().startup(sockets=[])
        self._listeners = [_Listener(each, self._make_protocol, self._is_own) for each in sockets or ()]

    def _make_protocol(self, on_closed: Callable[[], None]) -> H11Protocol:
        return _Connection(on_closed, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def end(self) -> None:
        """Let `run` end, from any thread; also before it has begun."""
        self.should_exit = True
        if self._told_to_end is not None:
            loop, event = self._told_to_end
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(event.set)

    async def main_loop(self) -> None:
        """Serve until `end`."""
        await self.on_tick(0)  # sets the headers of all answers
        event = asyncio.Event()
        self._told_to_end = asyncio.get_running_loop(), event
        if not self.should_exit:
            await event.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; if clients are still connected, give them a moment, then close their connections."""
        for listener in self._listeners:
            listener.close()
        for _ in range(_DISCONNECT_STEPS):
            if not self.server_state.connections:
                break
            await asyncio.sleep(0)
        else:
            await super().shutdown(sockets)


def _is_not_shutdown_noise(record: logging.LogRecord) -> bool:
    """Drop uvicorn's messages on connections that it closed because a job ended: that is expected."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.getMessage().startswith("Cancel ") or (kind and issubclass(kind, asyncio.CancelledError)))
