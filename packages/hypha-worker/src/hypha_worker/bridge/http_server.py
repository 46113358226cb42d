"""The HTTP server of a job bridge: uvicorn in a thread of its own, which ends as soon as it is told to.

Imported when a bridge is first used, since uvicorn takes a while to import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hypha_proto.bridge_api import BridgeErrorBody
from hypha_proto.codec import to_json
from hypha_worker.bridge.unix_socket import BACKLOG, peer_pid

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
"""Connections of one job, idle ones included; a further one is answered with 503 and closed."""
_SHUTDOWN_GRACE: Final = 1
"""Seconds that requests get to finish when the bridge closes."""
_DISCONNECT_STEPS: Final = 5
"""Iterations of the event loop in which it learns that the clients of an ended process are gone."""


class _Connection(H11Protocol):
    """One connection; it is refused if it is one too many, or not of the job."""

    def __init__(self, is_foreign: Callable[[socket.socket], bool], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._is_foreign = is_foreign

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol.connection_made`. A new connection's buffer holds the refusal."""
        refusal = None
        if self._is_foreign(transport.get_extra_info("socket")):
            refusal = _FOREIGN
        elif len(self.connections) >= MAX_CONNECTIONS:
            refusal = _TOO_MANY
        super().connection_made(transport)
        if refusal is not None:
            transport.write(refusal)
            transport.close()


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
            http=cast(Any, partial(_Connection, self._is_foreign)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_GRACE,
            timeout_keep_alive=3600,
            backlog=1,
        )
        super().__init__(config)
        self._told_to_end: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_own = is_own
        self._has_refused = False

    def _is_foreign(self, connection: socket.socket) -> bool:
        """Return whether a process that is not the job's has connected; log the first one."""
        pid = peer_pid(connection)
        if pid is None or self._is_own(pid):
            return False
        if not self._has_refused:
            self._has_refused = True
            _log.warning("process %d is refused at the bridge of a job that it does not belong to", pid)
        return True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections at listening sockets.

        With a backlog of 1 asyncio accepts few of them in one turn of the loop, so that a job cannot make this process
        open many more than the limit at once. The kernel's backlog, which asyncio has set to the same, is restored.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

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
        for server in self.servers:
            server.close()
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
