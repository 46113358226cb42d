"""Copying of one file's bytes between the disk and one stream, in both directions, in bounded memory.

While one block is on the network the next is read, or the previous one hashed and written, in a thread.
Each transfer uses two blocks of memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import trio

from hypha_net.bandwidth import TransferPacer
from hypha_net.buffer_pool import BLOCK, lent_buffer
from hypha_net.endpoint import Stream
from hypha_net.errors import TransferError
from hypha_net.transfer.framing import IDLE_TIMEOUT, TransferInterruptedError
from hypha_net.transfer.io.partial_file import PartialFile, StorageQuota, open_partial_file
from hypha_net.transfer.progress import TransferProgress


class IoThread:
    """One worker thread that runs one job at a time. Opened by `io_thread`.

    Uses trio directly: waking the event loop from the worker thread costs a third of waiting for it in a second thread.
    """

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


async def send_file(stream: Stream, file: FileIO, offset: int, size: int, progress: TransferProgress) -> None:
    """Send the bytes from `offset` to `size` of an open file, wherever it stands; several may send it at once.

    Raises:
        TransferError: the file has become shorter.
        TransferInterruptedError: the peer accepts no bytes.
        OSError: the file cannot be read.
    """
    pacer, length = progress.pacer, min(BLOCK, size - offset)
    with lent_buffer(length) as block, lent_buffer(length) as other:
        async with io_thread() as thread:
            thread.submit(read_at, file, block, offset)
            while offset < size:
                count: int = await thread.result()
                if not count:
                    # one that was opened by a descriptor has no other name
                    name = "the file" if isinstance(file.name, int) else file.name
                    raise TransferError(f"{name} became shorter while it was sent")
                offset += count
                block, other = other, block
                if offset < size:
                    thread.submit(read_at, file, block[: size - offset], offset)
                await _send(stream, other[:count], progress, pacer)


def read_at(file: FileIO, block: memoryview, offset: int) -> int:
    """Read into a block from some byte of a file on, without moving its position; return how many bytes came."""
    return os.preadv(file.fileno(), [block], offset) if block else 0


async def _send(stream: Stream, block: memoryview, progress: TransferProgress, pacer: TransferPacer) -> None:
    with anyio.CancelScope() as scope:
        while block:
            chunk, block = block[: pacer.chunk_size], block[pacer.chunk_size :]
            await pacer.wait(len(chunk))
            _extend_deadline(scope)
            await stream.send_all(chunk)
            progress.advance(len(chunk))
    if scope.cancelled_caught:
        raise TransferInterruptedError(f"the peer accepted no bytes for {IDLE_TIMEOUT:g} s")


def _extend_deadline(scope: anyio.CancelScope) -> None:
    """Move the deadline to `IDLE_TIMEOUT` seconds from now, or one less: setting it is slower than reading a clock."""
    deadline = anyio.current_time() + IDLE_TIMEOUT
    if not deadline - 1 < scope.deadline < math.inf:
        scope.deadline = deadline


async def send_buffer(stream: Stream, buffer: memoryview, progress: TransferProgress) -> None:
    """Send bytes that are in memory.

    Raises:
        TransferInterruptedError: the peer accepts no bytes.
    """
    await _send(stream, buffer, progress, progress.pacer)


@asynccontextmanager
async def incoming_file(
    path: Path, size: int, digest: str, quota: StorageQuota | None = None
) -> AsyncIterator[PartialFile]:
    """Start receiving a file, or resume what is there of it; what an interrupted transfer received is kept.

    Args:
        path: where it appears when it is complete.
        size: total number of bytes.
        digest: expected digest.
        quota: bounds what this and other transfers store together.

    Raises:
        TransferError: there is no space for it.
        OSError: the file cannot be written.
    """
    with anyio.CancelScope(shield=True):
        partial = await anyio.to_thread.run_sync(open_partial_file, path, size, digest, quota)
    try:
        yield partial
    finally:
        if not partial.file.closed:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial.suspend)


async def receive_content(stream: Stream, content: PartialFile, progress: TransferProgress) -> None:
    """Receive the rest of some content, up to its size or the clean end before it; keep what came in every case.

    Raises:
        TransferError: there is no space.
        TransferInterruptedError: no bytes come.
        StreamResetError: the stream broke off.
        OSError: the file cannot be written.
    """
    there, size = content.received, content.size
    length = min(BLOCK, size - there)
    with lent_buffer(length) as first, lent_buffer(length) as second:
        block, other = ReceivedBlock(first), ReceivedBlock(second)
        async with io_thread() as thread:
            if there:
                thread.submit(content.rehash_existing)
            more = True
            while more and there < size:
                block.reset(size - there)
                try:
                    more = await block.fill(stream, progress)
                finally:
                    there += block.count
                    await thread.result()
                    thread.submit(content.append, block.filled)
                block, other = other, block
            await thread.result()


async def receive_and_verify(stream: Stream, content: PartialFile, progress: TransferProgress) -> tuple[int, str]:
    """Receive the rest of some content, verify and publish it; return its size and digest.

    Raises:
        TransferInterruptedError: as `receive_content`, or what an earlier transfer left is wrong: it was removed, so
            the next attempt starts from the beginning.
        TransferError: as `receive_content`, or the content is not what was announced.
        StreamResetError, OSError: as `receive_content`.
    """
    resumed = content.received > 0
    await receive_content(stream, content, progress)
    try:
        digest = await anyio.to_thread.run_sync(content.finish)
    except TransferError as error:
        if resumed:
            raise TransferInterruptedError(f"what an earlier transfer left is wrong: {error}") from error
        raise
    return content.received, digest


class ReceivedBlock:
    """Buffer that is filled from a stream repeatedly."""

    def __init__(self, buffer: memoryview) -> None:
        self._whole = self._wanted = buffer
        self.count = 0
        """Number of bytes in it."""

    @property
    def filled(self) -> memoryview:
        return self._wanted[: self.count]

    def reset(self, wanted: int) -> None:
        self._wanted, self.count = self._whole[:wanted], 0

    async def fill(self, stream: Stream, progress: TransferProgress) -> bool:
        """Receive until the block is full (return True) or the stream has ended (return False)."""
        pacer = progress.pacer
        with anyio.CancelScope() as scope:
            while self.count < len(self._wanted):
                _extend_deadline(scope)
                count = await stream.receive_into(self._wanted[self.count : self.count + pacer.chunk_size])
                if not count:
                    return False
                self.count += count
                progress.advance(count)
                await pacer.wait(count)
        if scope.cancelled_caught:
            raise TransferInterruptedError(f"no bytes came for {IDLE_TIMEOUT:g} s")
        return True
