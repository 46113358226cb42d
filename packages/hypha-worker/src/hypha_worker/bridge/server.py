"""Serves the bridge of one job on a Unix socket, in a separate thread, because uvicorn needs asyncio.

The socket exists from the start; the thread and the HTTP server begin with the first connection, so that a process that
never uses its bridge costs neither. The worker runs on trio; requests cross from the bridge's event loop to the
worker's through one `anyio` portal. The thread ends in bounded time whatever its clients do: the connection of a client
that stops reading is closed.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import anyio.to_thread

from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.bridge.unix_socket import BridgeStartError, SocketPlace, bind_socket
from hypha_worker.errors import BridgeError, job_ending

if TYPE_CHECKING:
    from hypha_worker.bridge.http_server import HttpServer


def preload() -> None:
    """Import the modules that a bridge needs, so that the first job does not wait for them."""
    from hypha_worker.bridge import http_server, routes  # noqa: F401


@asynccontextmanager
async def open_bridge(
    backend: BridgeBackend, place: SocketPlace, is_own: Callable[[int], bool]
) -> AsyncIterator[BridgeServer]:
    """Serve `backend` at a Unix socket, which is created now, while the context is open.

    Processes for whose id `is_own` returns False are answered with 403; it is called in the server's thread.

    After the context is cancelled, requests are answered with 503 until the executor's process has ended. If the
    server fails to start at the first connection, the context is cancelled and raises `BridgeStartError`.

    Raises:
        BridgeStartError: the socket cannot be created.
    """
    with bind_socket(place) as listener:
        async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
            server = BridgeServer(backend, portal, listener, is_own)
            tasks.start_soon(server.run)
            try:
                yield server
            finally:
                with anyio.CancelScope(shield=True):
                    await server.stop()
                    await portal.stop(cancel_remaining=True)


@dataclass(slots=True)
class BridgeServer:
    """The HTTP server of one bridge, which begins with the first connection."""

    backend: BridgeBackend
    portal: anyio.from_thread.BlockingPortal
    listener: socket.socket
    is_own: Callable[[int], bool]
    """Returns whether a process, by its id, belongs to the job."""
    _server: HttpServer | None = None
    _scope: anyio.CancelScope = field(default_factory=partial(anyio.CancelScope, shield=True))
    """Shielded: it also serves a process that is being ended."""
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _is_used: bool = False

    def was_used(self) -> bool:
        """Return whether anybody has connected, also if the connection is not accepted yet."""
        return self._is_used or _has_connection(self.listener)

    def is_asked(self) -> bool:
        """Return whether a request waits for its answer."""
        return self._server is not None and bool(self._server.server_state.tasks)

    async def run(self) -> None:
        """Wait for the first connection, then serve until `stop`."""
        try:
            with self._scope:
                await anyio.wait_readable(self.listener)
                self._is_used = True
                await self._serve()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Stop waiting or serving; return when the thread has ended. Also before `run` has begun."""
        self._scope.cancel()
        if self._server is not None:
            self._server.end()
        await self._ended.wait()

    async def _serve(self) -> None:
        thread = anyio.CapacityLimiter(1)  # of its own: it must not wait for other jobs' threads
        self._server = await anyio.to_thread.run_sync(self._make_server, limiter=thread)
        await anyio.to_thread.run_sync(self._server.run, [self.listener], limiter=thread)
        if not self._server.should_exit:
            raise BridgeStartError("the job's bridge ended while the job was running")

    def _make_server(self) -> HttpServer:
        from hypha_worker.bridge.http_server import HttpServer
        from hypha_worker.bridge.routes import make_app

        return HttpServer(make_app(self.backend, _portal_call(self.portal)), self.is_own)


def _has_connection(listener: socket.socket) -> bool:
    """Return whether a connection waits to be accepted."""
    poll = select.poll()  # unlike `select.select`, it takes descriptors from 1024 on
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def _portal_call(portal: anyio.from_thread.BlockingPortal) -> Callable[..., Awaitable[Any]]:
    async def call(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        try:
            future = portal.start_task_soon(function, *args)
        except RuntimeError:  # the portal is closed
            raise job_ending() from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise job_ending() from None  # the worker's side was cancelled, not this task
        except OSError as error:
            raise BridgeError(500, "worker-failed", f"the worker's disk: {error}") from error

    return call
