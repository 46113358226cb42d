"""Worker thread that reads, hashes and writes files while the event loop moves bytes between memory and the network.

Uses trio directly: waking the event loop from the worker thread costs a third of waiting for it in a second thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import anyio
import trio


class IoThread:
    """One worker thread that runs one job at a time. Opened by `io_thread`."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._loop = trio.lowlevel.current_trio_token()
        self._job: Future[Any] | None = None

    def submit(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Start a job; the previous one must have been awaited."""
        self._job = self._thread.submit(job, *arguments)

    async def result(self) -> Any:
        """Return or raise the result of the last job, or None if there is none. Waits without blocking the loop."""
        job, self._job = self._job, None
        if job is None:
            return None
        await self._wait(job)
        return job.result()

    async def finish(self) -> None:
        """Wait for the last job and ignore its result."""
        if self._job is not None:
            await self._wait(self._job)

    async def _wait(self, job: Future[Any]) -> None:
        if job.done():  # the usual case
            return
        done = trio.Event()
        job.add_done_callback(lambda _: self._loop.run_sync_soon(done.set))
        with anyio.CancelScope(shield=True):
            await done.wait()


@asynccontextmanager
async def io_thread() -> AsyncIterator[IoThread]:
    """Run one worker thread; wait for its last job on exit."""
    thread = ThreadPoolExecutor(1, "hypha-transfer")
    worker = IoThread(thread)
    try:
        yield worker
    finally:
        await worker.finish()
        thread.shutdown(wait=False)
