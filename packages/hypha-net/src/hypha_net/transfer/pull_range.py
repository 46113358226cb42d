"""Pulls a part of a file, so that several peers can send parts of the same content at once.

The pull protocol sends from some byte to the end; the stream is reset when the part is complete. A part cannot be
verified by itself: the caller verifies the whole content.
"""

from __future__ import annotations

import os
from io import FileIO
from typing import Final

import anyio
import anyio.to_thread

from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import (
    ContentMismatchError,
    StreamClosedError,
    StreamResetError,
    TransferError,
)
from hypha_net.transfer.framing import IDLE_TIMEOUT, describe_request, receive_message, refusal_error, send_message
from hypha_net.transfer.progress import TransferProgress
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL
from hypha_proto.transfer import PullAnswer, PullRequest, Refusal

_BLOCK: Final = 1 << 20


async def pull_range(
    endpoint: Endpoint, peer: PeerId, request: PullRequest, file: FileIO, end: int, *, size: int, digest: str
) -> None:
    """Pull the bytes from `request.offset` to `end` and write them at their place in an open file.

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
    stream = await endpoint.open_stream(peer, [PULL])
    try:
        await send_message(stream, to_cbor(PullRequest, request))
        await stream.send_eof()
        answer = from_cbor(PullAnswer, await receive_message(stream))
        if isinstance(answer, Refusal):
            raise refusal_error(answer)
        if (answer.size, answer.digest) != (size, digest):
            raise ContentMismatchError(
                f"the peer has {answer.size} bytes with {answer.digest}, not {size} with {digest}"
            )
        progress = TransferProgress(endpoint, peer, describe_request(request), "received")
        with progress.report_outcome():
            progress.begin(request.offset, size)
            await _receive(stream, file, request.offset, end, progress)
    except (StreamResetError, StreamClosedError) as error:
        raise TransferError(f"{what} broke off: {error}") from error
    except DecodeError as error:
        raise TransferError(f"{what}: malformed header: {error}") from error
    finally:
        with anyio.CancelScope(shield=True):
            await stream.reset()


async def _receive(stream: Stream, file: FileIO, offset: int, end: int, progress: TransferProgress) -> None:
    block, pacer = memoryview(bytearray(min(_BLOCK, end - offset))), progress.pacer
    while offset < end:
        wanted, filled = block[: end - offset], 0
        while filled < len(wanted):
            with anyio.move_on_after(IDLE_TIMEOUT) as scope:
                count = await stream.receive_into(wanted[filled : filled + pacer.chunk_size])
            if scope.cancelled_caught:
                raise TransferError(f"no bytes came for {IDLE_TIMEOUT:g} s")
            if not count:
                raise TransferError(f"the stream ended after {offset + filled} bytes")
            filled += count
            progress.advance(count)
            await pacer.wait(count)
        await anyio.to_thread.run_sync(_write, file, wanted, offset)
        offset += filled


def _write(file: FileIO, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(file.fileno(), block, offset)
        block, offset = block[count:], offset + count
