"""The bytes of one file between the disk and one stream, in both directions, in bounded memory.

While a block is on the network the next is read, or the one before hashed and written, in a thread (`behind`). Two
blocks a transfer are all the memory there is.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_net.bandwidth import TransferPacer
from hypha_net.endpoint import Stream
from hypha_net.errors import TransferError
from hypha_net.transfer.framing import IDLE_TIMEOUT, TransferInterruptedError
from hypha_net.transfer.io.io_thread import behind
from hypha_net.transfer.io.partial_file import IncomingContent, open_arriving
from hypha_net.transfer.progress import Progress

CHUNK: Final = 2 << 20
"""Bytes that are read or written at a time: enough to be worth the way to a thread and back."""


async def send_file(stream: Stream, path: Path, offset: int, size: int, progress: Progress) -> None:
    """Send what lies between `offset` and `size` of a file.

    Raises:
        TransferError: the file has become shorter.
        BrokenOffError: the peer takes nothing.
        OSError: the file cannot be read.
    """
    pace, left = progress.pace, size - offset
    blocks = [memoryview(bytearray(min(CHUNK, left))) for _ in range(2)]
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        async with behind() as thread:
            thread.start(_read, file, blocks[0], left)
            while left:
                count: int = await thread.result()
                if not count:
                    raise TransferError(f"{path} became shorter while it was sent")
                left -= count
                blocks.reverse()
                thread.start(_read, file, blocks[0], left)
                await _send(stream, blocks[1][:count], progress, pace)


def _read(file: FileIO, block: memoryview, left: int) -> int:
    return file.readinto(block[:left]) or 0


async def _send(stream: Stream, block: memoryview, progress: Progress, pace: TransferPacer) -> None:
    with anyio.CancelScope() as scope:
        while block:
            piece, block = block[: pace.chunk_size], block[pace.chunk_size :]
            await pace.wait(len(piece))
            _allow_time(scope)
            await stream.send_all(piece)
            progress.moved(len(piece))
    if scope.cancelled_caught:
        raise TransferInterruptedError(f"the peer took nothing for {IDLE_TIMEOUT:g} s")


def _allow_time(scope: anyio.CancelScope) -> None:
    """Give what comes next `IDLE_TIMEOUT` seconds, or one less: a deadline costs more than to know the time."""
    deadline = anyio.current_time() + IDLE_TIMEOUT
    if not deadline - 1 < scope.deadline < math.inf:
        scope.deadline = deadline


async def send_buffer(stream: Stream, buffer: memoryview, progress: Progress) -> None:
    """Send bytes that are in memory already.

    Raises:
        BrokenOffError: the peer takes nothing.
    """
    await _send(stream, buffer, progress, progress.pace)


async def receive_file(stream: Stream, arriving: IncomingContent, max_bytes: int, progress: Progress) -> None:
    """Receive the rest of a file: up to its announced size, or to the clean end. What came is stored in every case.

    Raises:
        TransferError: more than `max_bytes` came, or there is no room.
        BrokenOffError: nothing comes.
        StreamResetError: the stream broke off.
        OSError: the file cannot be written.
    """
    there, size = arriving.received, arriving.size
    room = CHUNK if size is None else min(CHUNK, size - there)
    blocks = [_Block(room), _Block(room)]
    async with behind() as thread:
        thread.start(arriving.catch_up)
        while size is None or there < size:
            block, other = blocks
            block.begin(room if size is None else min(room, size - there))
            try:
                more = await block.fill(stream, progress)
            finally:
                there += block.count
                if there <= max_bytes:
                    await thread.result()
                    thread.start(arriving.store, block.filled)
            if there > max_bytes:
                raise TransferError(f"more than the limit of {max_bytes} bytes came")
            if not more:
                break
            blocks = [other, block]
        await thread.result()


async def receive_whole(
    stream: Stream, arriving: IncomingContent, max_bytes: int, progress: Progress
) -> tuple[int, str]:
    """Receive the rest of a file and let it appear at its landing place; its size and digest.

    Raises:
        BrokenOffError: as `receive_file`, or what an earlier transfer left does not fit: it is gone, so begin anew.
        TransferError: as `receive_file`, or the file is not what was announced.
        StreamResetError, OSError: as `receive_file`.
    """
    resumed = arriving.received > 0
    await receive_file(stream, arriving, max_bytes, progress)
    try:
        digest = await anyio.to_thread.run_sync(arriving.finish)
    except TransferError as error:
        if resumed:
            raise TransferInterruptedError(f"what was left of an earlier transfer does not fit: {error}") from error
        raise
    return arriving.received, digest


@asynccontextmanager
async def arriving_at(target: Path, size: int | None, digest: str | None) -> AsyncIterator[IncomingContent]:
    """See `open_arriving`. Whatever happens, what has come is kept or removed, and nothing stays open."""
    with anyio.CancelScope(shield=True):
        arriving = await anyio.to_thread.run_sync(open_arriving, target, size, digest)
    try:
        yield arriving
    finally:
        if not arriving.file.closed:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(arriving.leave)


class _Block:
    """A buffer that is filled from a stream, again and again."""

    def __init__(self, size: int) -> None:
        self._whole = memoryview(bytearray(size))
        self._wanted = self._whole
        self.count = 0
        """Bytes in it."""

    @property
    def filled(self) -> memoryview:
        return self._wanted[: self.count]

    def begin(self, wanted: int) -> None:
        self._wanted, self.count = self._whole[:wanted], 0

    async def fill(self, stream: Stream, progress: Progress) -> bool:
        """Receive until it is full (true) or the stream has ended (false)."""
        pace = progress.pace
        with anyio.CancelScope() as scope:
            while self.count < len(self._wanted):
                _allow_time(scope)
                count = await stream.receive_into(self._wanted[self.count : self.count + pace.chunk_size])
                if not count:
                    return False
                self.count += count
                progress.moved(count)
                await pace.wait(count)
        if scope.cancelled_caught:
            raise TransferInterruptedError(f"nothing came for {IDLE_TIMEOUT:g} s")
        return True
