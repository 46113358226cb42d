"""Client of the pull protocol: asks for a file from some byte on, and verifies the announced length and digest.

The other side is `pull_server`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from msgspec.structs import replace

from hypha_net import instrumentation
from hypha_net.buffer_pool import lent_buffer
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import ContentMismatchError, TransferError
from hypha_net.transfer.framing import (
    TransferInterruptedError,
    describe_request,
    receive_message,
    refusal_error,
    reset_on_error,
    send_message,
)
from hypha_net.transfer.io.partial_file import StorageQuota, resumable_bytes
from hypha_net.transfer.io.stream_copy import ReceivedBlock, incoming_file, receive_and_verify
from hypha_net.transfer.progress import TransferProgress
from hypha_net.transfer.retry import retry_with_deadline
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL
from hypha_proto.transfer import PullAnswer, PullRequest, PullStart, Refusal

ANSWER_TIMEOUT: Final = 30.0
"""Seconds for size and digest of a file."""
_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PullResult:
    """Size and digest of a file that was pulled."""

    size: int
    digest: str


async def pull(
    endpoint: Endpoint,
    peer: PeerId,
    request: PullRequest,
    target: Path,
    *,
    max_bytes: int = 1 << 40,
    digest: str | None = None,
    timeout: float = 600.0,
    quota: StorageQuota | None = None,
) -> PullResult:
    """Pull a file from `peer` to `target`, which appears only when it is complete.

    An interrupted pull is resumed a few times; what an earlier call left beside `target` is used too, if the peer still
    has the same content.

    Args:
        digest: expected digest; any if None.
        max_bytes: larger files are refused.
        timeout: seconds for the whole pull.
        quota: bounds what this and other transfers store together.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: the peer refuses, and says why, or the quota does not allow it.
        ContentMismatchError: length or digest of what the peer has is wrong.
        NoSpaceError: the disk of this machine is full.
        TransferError: interrupted, too large, or too slow.
        OSError: the file cannot be written.
    """
    incoming = _Pull(endpoint, peer, request, target, quota, max_bytes, digest)
    return await retry_with_deadline(incoming.attempt, incoming.what, incoming.progress, timeout)


async def announced_content(endpoint: Endpoint, peer: PeerId, request: PullRequest) -> PullResult:
    """Ask `peer` for size and digest of a file, without its content.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: the peer refuses, and says why.
        TransferError: the answer is malformed or does not come in time.
    """
    what = f"question for {describe_request(request)} of {peer}"
    with anyio.move_on_after(ANSWER_TIMEOUT):
        async with _asked(endpoint, peer, request, what) as (_, answer):
            return PullResult(answer.size, answer.digest)
    raise TransferError(f"{what}: no answer within {ANSWER_TIMEOUT:g} s")


@dataclass(slots=True)
class _Pull:
    endpoint: Endpoint
    peer: PeerId
    request: PullRequest
    target: Path
    quota: StorageQuota | None
    max_bytes: int
    expected_digest: str | None
    announced_digest: str | None = None
    """Digest of the peer's content, once it is known."""
    restart: bool = False
    """Whether the received bytes cannot be resumed."""
    progress: TransferProgress = field(init=False)

    def __post_init__(self) -> None:
        self.announced_digest = self.expected_digest
        self.progress = TransferProgress(self.endpoint, self.peer, describe_request(self.request), "received")

    @property
    def what(self) -> str:
        return f"pull of {describe_request(self.request)} from {self.peer}"

    async def attempt(self) -> PullResult:
        offset = 0
        if not self.restart:
            offset = await anyio.to_thread.run_sync(resumable_bytes, self.target, self.announced_digest)
        stream = await self.endpoint.open_stream(self.peer, [PULL])
        async with reset_on_error(stream, self.what):
            return await self._pull_from(stream, offset)

    async def _pull_from(self, stream: Stream, offset: int) -> PullResult:
        answer = await _ask(stream, replace(self.request, offset=offset))
        if isinstance(answer, Refusal):
            if not offset:
                raise refusal_error(answer)
            self.restart = True  # the peer's file may now be shorter than what was received
            raise TransferInterruptedError(f"{self.what} cannot go on at byte {offset}: {refusal_error(answer)}")
        self._check(answer, offset)
        return await self._receive(stream, answer, offset)

    def _check(self, answer: PullStart, offset: int) -> None:
        if answer.size > self.max_bytes:
            raise TransferError(f"{answer.size} bytes are over the limit of {self.max_bytes}")
        if self.expected_digest is not None and answer.digest != self.expected_digest:
            raise ContentMismatchError(f"the peer has {answer.digest} where {self.expected_digest} is wanted")
        before, self.announced_digest = self.announced_digest, answer.digest
        if offset and answer.digest != before:
            raise TransferInterruptedError(
                f"{self.what}: the peer's file has changed since {offset} bytes of it were received"
            )

    async def _receive(self, stream: Stream, announced: PullStart, offset: int) -> PullResult:
        async with incoming_file(self.target, announced.size, announced.digest, self.quota) as content:
            if content.received != offset:
                self.restart = content.received == 0
                raise TransferInterruptedError(f"{self.what} can go on at byte {content.received}, not {offset}")
            self.progress.begin(offset, announced.size)
            return PullResult(*await receive_and_verify(stream, content, self.progress))


async def pull_range(
    endpoint: Endpoint, peer: PeerId, request: PullRequest, file: FileIO, end: int, *, size: int, digest: str
) -> None:
    """Pull the bytes from `request.offset` to `end` and write them at their place in an open file.

    So several peers can send parts of the same content at once. A part cannot be verified by itself: the caller
    verifies the whole content.

    Args:
        endpoint: this node.
        peer: who has the content.
        request: names the content at the peer.
        file: open for writing; its position does not matter.
        end: position after the last wanted byte.
        size: bytes of the whole content.
        digest: digest of the whole content; the peer must announce both.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: the peer refuses, and says why.
        ContentMismatchError: the peer announces another size or digest.
        TransferError: it was interrupted, or no bytes came for `IDLE_TIMEOUT` seconds.
        OSError: the file cannot be written.
    """
    what = f"pull of {describe_request(request)} from {peer}"
    async with _asked(endpoint, peer, request, what) as (stream, answer):
        if (answer.size, answer.digest) != (size, digest):
            raise ContentMismatchError(
                f"the peer has {answer.size} bytes with {answer.digest}, not {size} with {digest}"
            )
        progress = TransferProgress(endpoint, peer, describe_request(request), "received")
        with progress.report_outcome():
            progress.begin(request.offset, size)
            await _receive_range(stream, file, request.offset, end, progress)


async def _receive_range(stream: Stream, file: FileIO, offset: int, end: int, progress: TransferProgress) -> None:
    with lent_buffer(min(_BLOCK, end - offset)) as buffer:
        block = ReceivedBlock(buffer)
        while offset < end:
            block.reset(end - offset)
            if not await block.fill(stream, progress):
                raise TransferError(f"the stream ended after {offset + block.count} bytes")
            await anyio.to_thread.run_sync(_write, file, block.filled, offset)
            offset += block.count


def _write(file: FileIO, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(file.fileno(), block, offset)
        block, offset = block[count:], offset + count


@asynccontextmanager
async def _asked(
    endpoint: Endpoint, peer: PeerId, request: PullRequest, what: str
) -> AsyncIterator[tuple[Stream, PullStart]]:
    """Ask for a file, of which the end is not wanted: the stream is reset when the context ends."""
    stream = await endpoint.open_stream(peer, [PULL])
    async with reset_on_error(stream, what):
        answer = await _ask(stream, request)
        if isinstance(answer, Refusal):
            raise refusal_error(answer)
        yield stream, answer
        await stream.reset()


async def _ask(stream: Stream, request: PullRequest) -> PullStart | Refusal:
    await send_message(stream, to_cbor(PullRequest, instrumentation.with_trace(request)))
    await stream.send_eof()
    answer: PullStart | Refusal = from_cbor(PullAnswer, await receive_message(stream))
    return answer
