"""A thread that reads, hashes and writes files while the event loop moves bytes between memory and the network.

Knows trio: a thread that wakes the loop costs a third of one more thread that waits for the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import anyio
import trio


class IoThread:
    """One piece of work at a time, in a thread of its own. Made by `behind`."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._loop = trio.lowlevel.current_trio_token()
        self._work: Future[Any] | None = None

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin a piece of work; the one before must have been awaited."""
        self._work = self._thread.submit(work, *arguments)

    async def result(self) -> Any:
        """What the last piece of work returned, or raised; none before the first. Waits without blocking the loop."""
        work, self._work = self._work, None
        if work is None:
            return None
        await self._over(work)
        return work.result()

    async def finish(self) -> None:
        """Wait for work that nobody asks about any more."""
        if self._work is not None:
            await self._over(self._work)

    async def _over(self, work: Future[Any]) -> None:
        if work.done():  # most often it is
            return
        over = trio.Event()
        work.add_done_callback(lambda _: self._loop.run_sync_soon(over.set))
        with anyio.CancelScope(shield=True):
            await over.wait()


@asynccontextmanager
async def behind() -> AsyncIterator[IoThread]:
    """A thread for the time of the context; what it does is over when the context is."""
    thread = ThreadPoolExecutor(1, "hypha-transfer")
    worker = IoThread(thread)
    try:
        yield worker
    finally:
        await worker.finish()
        thread.shutdown(wait=False)
