"""The HTTP server of a job bridge: uvicorn in a thread of its own, which ends as soon as it is told to.

Called by `server`, which imports this module when a bridge is first used, since uvicorn takes a while to import.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import Any, Final

import uvicorn

_SHUTDOWN_GRACE: Final = 1
"""Seconds that requests get to finish when the bridge closes."""
_DISCONNECT_STEPS: Final = 5
"""Iterations of the event loop in which it learns that the clients of an ended process are gone."""


class HttpServer(uvicorn.Server):
    """A `uvicorn.Server` without its delays at the end, which together take 0.2 s of every job that uses its bridge.

    uvicorn looks every 0.1 s whether it is to end, and then waits 0.1 s even if no client is connected.
    """

    def __init__(self, app: Any) -> None:
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
        for _ in range(_DISCONNECT_STEPS):
            if not self.server_state.connections:
                break
            await asyncio.sleep(0)
        else:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()


def _is_not_shutdown_noise(record: logging.LogRecord) -> bool:
    """Drop uvicorn's messages on connections that it closed because a job ended: that is expected."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.getMessage().startswith("Cancel ") or (kind and issubclass(kind, asyncio.CancelledError)))
