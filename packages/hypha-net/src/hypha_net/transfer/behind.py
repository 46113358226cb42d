"""A thread that reads, hashes and writes files while the event loop moves bytes between memory and the network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread


class Behind:
    """One piece of work at a time, in a thread of its own. Made by `behind`."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._work: Future[Any] | None = None

    def start(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Begin a piece of work; the one before must have been awaited."""
        self._work = self._thread.submit(work, *arguments)

    async def result(self) -> Any:
        """What the last piece of work returned, or raised; none before the first. Waits without blocking the loop."""
        work, self._work = self._work, None
        if work is None:
            return None
        if not work.done():  # most often it is, and no second thread has to wait for the first
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(wait, (work,))
        return work.result()

    async def finish(self) -> None:
        """Wait for work that nobody asks about any more."""
        if self._work is not None:
            self._work.add_done_callback(lambda work: work.exception())
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(wait, (self._work,))


@asynccontextmanager
async def behind() -> AsyncIterator[Behind]:
    """A thread for the time of the context; what it does is over when the context is."""
    thread = ThreadPoolExecutor(1, "hypha-transfer")
    worker = Behind(thread)
    try:
        yield worker
    finally:
        await worker.finish()
        thread.shutdown(wait=False)
