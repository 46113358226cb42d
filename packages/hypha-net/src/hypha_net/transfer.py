"""Move files: push and pull with length and digest, bounded in memory, visible only when whole.

Between our own nodes a header says what moves, how long it is and what it hashes to, and a receipt ends a push. A peer
of the old wire knows neither: then the file is what came before the clean end of the stream (`hypha_proto.transfer`).
Before this room: `requests` told the peers what to expect. After it: the bridge, the parameter server, the result.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from blake3 import blake3

from hypha_net import telemetry
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import StreamClosedError, StreamResetError, TransferError, TransferRefusedError
from hypha_proto.codec import from_cbor, from_json, to_cbor, to_json
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocol import PULL, PULL_WITH_HEADER, PUSH, PUSH_WITH_HEADER
from hypha_proto.transfer import (
    MAX_HEADER,
    GoOn,
    PullAnswer,
    PullHeader,
    PullRequest,
    PullStart,
    PushAnswer,
    PushHeader,
    PushReceipt,
    Receipt,
    Refusal,
)

_log = logging.getLogger(__name__)

CHUNK: Final = 1 << 20
IDLE_TIMEOUT: Final = 60.0
"""Seconds without a byte after which a transfer is given up."""
_MOVED: Final = telemetry.Counter("hypha.transfer.io", "By", "Bytes of files moved between peers.")
_TRANSMIT: Final[telemetry.Attributes] = {"network.io.direction": "transmit"}
_RECEIVE: Final[telemetry.Attributes] = {"network.io.direction": "receive"}


@dataclass(frozen=True, slots=True)
class Pulled:
    """A file that has arrived."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Offered:
    """A file that may be pulled; `digest` (``blake3:…``) is computed when it is not known."""

    path: Path
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a pushed file may land."""

    path: Path
    max_bytes: int
    arrived: Callable[[int, str], Awaitable[None]]
    """Awaited with size and digest when the file is whole at `path`, before the pusher gets its receipt."""


async def describe(path: Path) -> tuple[int, str]:
    """Size in bytes and digest (``blake3:…``) of a file.

    Raises:
        OSError: the file cannot be read.
    """
    return await anyio.to_thread.run_sync(_describe, path)


def _describe(path: Path) -> tuple[int, str]:
    hasher = blake3()
    hasher.update_mmap(path)
    return path.stat().st_size, f"blake3:{hasher.hexdigest()}"


# ---------------------------------------------------------------------------------------------------------------- push


async def push(endpoint: Endpoint, peer: PeerId, path: Path, header: PushHeader, *, timeout: float = 600.0) -> int:
    """Push the file at `path` to `peer` and wait for its receipt; returns the bytes sent.

    Falls back to the old wire's push, which has neither header nor receipt.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not take the file, and says why.
        TransferError: the stream broke off, the peer's answers make no sense, or `timeout` seconds have passed.
        OSError: the file cannot be read.
    """
    try:
        with anyio.fail_after(timeout):
            stream = await endpoint.open_stream(peer, [PUSH_WITH_HEADER, PUSH])
            async with _ending(stream, f"push of {header.name} to {peer}"):
                if stream.protocol == PUSH:
                    sent = await _send_file(stream, path, 0)
                    await stream.send_eof()
                    return sent
                return await _push_with_header(stream, path, header)
    except TimeoutError:
        raise TransferError(f"push of {header.name} to {peer} was not done within {timeout:g} s") from None


async def _push_with_header(stream: Stream, path: Path, header: PushHeader) -> int:
    await _send_message(stream, to_cbor(PushHeader, telemetry.with_trace(header)))
    answer = from_cbor(PushAnswer, await _receive_message(stream))
    if isinstance(answer, Refusal):
        raise TransferRefusedError(answer.reason)
    if answer.offset > header.size:
        raise TransferError(f"asked to go on from byte {answer.offset} of {header.size}")
    sent = await _send_file(stream, path, answer.offset)
    await stream.send_eof()
    receipt = from_cbor(PushReceipt, await _receive_message(stream))
    if isinstance(receipt, Refusal):
        raise TransferRefusedError(receipt.reason)
    return sent


def serve_pushes(
    endpoint: Endpoint, accept: Callable[[PeerId, PushHeader | None], Awaitable[Landing | Refusal]]
) -> None:
    """Take files that peers push, where `accept(peer, header)` lets them land.

    `header` is none for a peer of the old wire: its PeerId is all that is known. A file is written beside its landing
    place under a temporary name and renamed only when it is whole and its digest is right.
    """

    async def headed(stream: Stream) -> None:
        async with _ending(stream, f"push from {stream.peer}"):
            header: PushHeader = from_cbor(PushHeader, await _receive_message(stream))
            about: dict[str, telemetry.Value] = {"hypha.peer.id": str(stream.peer), "hypha.round": header.round}
            with telemetry.serving(f"receive {header.kind[:40]}", header, about):
                landing = await accept(stream.peer, header)
                if isinstance(landing, Landing) and header.size > landing.max_bytes:
                    landing = Refusal(reason=f"{header.size} bytes are over the limit of {landing.max_bytes}")
                if isinstance(landing, Refusal):
                    await _refuse(stream, PushAnswer, landing)
                    return
                await _send_message(stream, to_cbor(PushAnswer, GoOn(offset=0)))
                await _land(stream, landing, header)

    async def bare(stream: Stream) -> None:
        async with _ending(stream, f"push from {stream.peer}"):
            landing = await accept(stream.peer, None)
            if isinstance(landing, Refusal):
                raise TransferRefusedError(landing.reason)
            pulled = await _receive_file(stream, landing.path, None, None, landing.max_bytes)
            await landing.arrived(pulled.size, pulled.digest)

    endpoint.handle(PUSH_WITH_HEADER, _logging_failures(headed))
    endpoint.handle(PUSH, _logging_failures(bare))


async def _land(stream: Stream, landing: Landing, header: PushHeader) -> None:
    try:
        pulled = await _receive_file(stream, landing.path, header.size, header.digest, landing.max_bytes)
        await landing.arrived(pulled.size, pulled.digest)
    except StreamResetError:
        raise
    except (TransferError, OSError) as error:
        _log.warning("push of %s from %s refused: %s", header.name, stream.peer, error)
        await _refuse(
            stream, PushReceipt, Refusal(reason=error.reason if isinstance(error, TransferRefusedError) else str(error))
        )
        return
    await _send_message(stream, to_cbor(PushReceipt, Receipt(size=pulled.size)))
    await stream.send_eof()


# ---------------------------------------------------------------------------------------------------------------- pull


async def pull(
    endpoint: Endpoint,
    peer: PeerId,
    request: PullRequest,
    target: Path,
    *,
    max_bytes: int = 1 << 40,
    digest: str | None = None,
    timeout: float = 600.0,
) -> Pulled:
    """Pull a file from `peer` to `target`, which appears only when it is whole.

    Args:
        digest: what it must hash to; from a peer of the old wire nothing else vouches for it.
        max_bytes: more than this is not taken.
        timeout: seconds for all of it.

    Raises:
        UnreachableError: the peer cannot be reached.
        TransferRefusedError: it does not give the file, and says why.
        TransferError: cut, wrong length or digest, too large, or too slow.
        OSError: the file cannot be written.
    """
    what = f"pull of {request.dataset}/{request.name or request.index} from {peer}"
    try:
        with anyio.fail_after(timeout):
            stream = await endpoint.open_stream(peer, [PULL_WITH_HEADER, PULL])
            async with _ending(stream, what):
                if stream.protocol == PULL:
                    return await _pull_bare(stream, request, target, digest, max_bytes)
                return await _pull_with_header(stream, request, target, digest, max_bytes)
    except TimeoutError:
        raise TransferError(f"{what} was not done within {timeout:g} s") from None


async def _pull_bare(stream: Stream, request: PullRequest, target: Path, digest: str | None, max_bytes: int) -> Pulled:
    if request.name is not None:
        raise TransferRefusedError(f"the peer serves slices only, and no {request.name}")
    await _send_message(stream, to_json(PullHeader, PullHeader(dataset=request.dataset, index=request.index)))
    await stream.send_eof()  # an old peer drops the stream after the last byte: a reset unless we have ended our side
    return await _receive_file(stream, target, None, digest, max_bytes)


async def _pull_with_header(
    stream: Stream, request: PullRequest, target: Path, digest: str | None, max_bytes: int
) -> Pulled:
    await _send_message(stream, to_cbor(PullRequest, telemetry.with_trace(request)))
    await stream.send_eof()
    answer = from_cbor(PullAnswer, await _receive_message(stream))
    if isinstance(answer, Refusal):
        raise TransferRefusedError(answer.reason)
    if answer.size > max_bytes:
        raise TransferError(f"{answer.size} bytes are over the limit of {max_bytes}")
    if digest is not None and answer.digest != digest:
        raise TransferError(f"the peer has {answer.digest} where {digest} is wanted")
    return await _receive_file(stream, target, answer.size, answer.digest, max_bytes)


def serve_pulls(endpoint: Endpoint, resolve: Callable[[PeerId, PullRequest], Awaitable[Offered | Refusal]]) -> None:
    """Give files to peers, as `resolve(peer, request)` finds them, over both protocols."""

    async def headed(stream: Stream) -> None:
        async with _ending(stream, f"pull by {stream.peer}"):
            request: PullRequest = from_cbor(PullRequest, await _receive_message(stream))
            with telemetry.serving("give file", request, {"hypha.peer.id": str(stream.peer)}):
                offered = await resolve(stream.peer, request)
                if isinstance(offered, Refusal):
                    await _refuse(stream, PullAnswer, offered)
                    return
                size, digest = await _measured(offered)
                if request.offset > size:
                    reason = f"offset {request.offset} is past the end ({size})"
                    await _refuse(stream, PullAnswer, Refusal(reason=reason))
                    return
                await _send_message(stream, to_cbor(PullAnswer, PullStart(size=size, digest=digest)))
                await _send_file(stream, offered.path, request.offset)
                await stream.send_eof()

    async def bare(stream: Stream) -> None:
        async with _ending(stream, f"pull by {stream.peer}"):
            header: PullHeader = from_json(PullHeader, await _receive_message(stream))
            offered = await resolve(stream.peer, PullRequest(dataset=header.dataset, index=header.index))
            if isinstance(offered, Refusal):
                raise TransferRefusedError(offered.reason)
            await _send_file(stream, offered.path, 0)
            await stream.send_eof()

    endpoint.handle(PULL_WITH_HEADER, _logging_failures(headed))
    endpoint.handle(PULL, _logging_failures(bare))


async def _measured(offered: Offered) -> tuple[int, str]:
    if offered.digest is None:
        return await describe(offered.path)
    return offered.path.stat().st_size, offered.digest


# ------------------------------------------------------------------------------------------------------- bytes and ends


@asynccontextmanager
async def _ending(stream: Stream, what: str) -> AsyncIterator[None]:
    """Close the stream cleanly after success, reset it after anything else; translate what the stream raises."""
    try:
        yield
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await stream.reset()
        if isinstance(error, StreamResetError | StreamClosedError):
            raise TransferError(f"{what} broke off: {error}") from error
        if isinstance(error, DecodeError):
            raise TransferError(f"{what}: malformed header: {error}") from error
        raise
    with anyio.CancelScope(shield=True):
        await stream.aclose()


def _logging_failures(handler: Callable[[Stream], Awaitable[None]]) -> Callable[[Stream], Awaitable[None]]:
    async def handle(stream: Stream) -> None:
        try:
            await handler(stream)
        except (TransferError, OSError) as error:
            _log.warning("%s: %s", stream.peer, error)

    return handle


async def _refuse(stream: Stream, kind: Any, refusal: Refusal) -> None:
    with suppress(StreamResetError):
        await _send_message(stream, to_cbor(kind, refusal))
        await stream.send_eof()


async def _send_message(stream: Stream, data: bytes) -> None:
    await stream.send_all(len(data).to_bytes(8, "little") + data)


async def _receive_message(stream: Stream) -> bytes:
    with anyio.move_on_after(IDLE_TIMEOUT):
        length = int.from_bytes(await _receive_exactly(stream, 8), "little")
        if length > MAX_HEADER:
            raise TransferError(f"a header of {length} bytes is over the limit of {MAX_HEADER}")
        return await _receive_exactly(stream, length)
    raise TransferError(f"no header within {IDLE_TIMEOUT:g} s")


async def _receive_exactly(stream: Stream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise TransferError(f"the stream ended within a header, after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


async def _send_file(stream: Stream, path: Path, offset: int) -> int:
    sent = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while block := await anyio.to_thread.run_sync(file.read, CHUNK):
            with anyio.move_on_after(IDLE_TIMEOUT) as scope:
                await stream.send_all(block)
            if scope.cancelled_caught:
                raise TransferError(f"the peer took nothing for {IDLE_TIMEOUT:g} s")
            sent += len(block)
            _MOVED.add(len(block), _TRANSMIT)
    return sent


async def _receive_file(stream: Stream, target: Path, size: int | None, digest: str | None, max_bytes: int) -> Pulled:
    """Receive `size` bytes (none: up to the clean end) into `target`, through a temporary file beside it."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    hasher = hashlib.sha256() if digest and digest.startswith("sha256:") else blake3()
    try:
        received = 0
        with part.open("xb", buffering=0) as file:
            while block := await _receive_block(stream, CHUNK if size is None else min(CHUNK, size - received)):
                received += len(block)
                if received > max_bytes:
                    raise TransferError(f"more than the limit of {max_bytes} bytes came")
                _MOVED.add(len(block), _RECEIVE)
                await anyio.to_thread.run_sync(_store, file, hasher, block)
        found = f"{hasher.name}:{hasher.hexdigest()}"
        _check(received, size, found, digest)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return Pulled(received, found)


async def _receive_block(stream: Stream, wanted: int) -> bytearray:
    block = bytearray()
    while len(block) < wanted:
        with anyio.move_on_after(IDLE_TIMEOUT) as scope:
            piece = await stream.receive_some(wanted - len(block))
        if scope.cancelled_caught:
            raise TransferError(f"nothing came for {IDLE_TIMEOUT:g} s")
        if not piece:
            break
        block += piece
    return block


def _store(file: Any, hasher: Any, block: bytearray) -> None:
    hasher.update(block)
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]


def _check(received: int, size: int | None, found: str, digest: str | None) -> None:
    if size is not None and received != size:
        raise TransferError(f"{received} bytes came of {size}")
    if digest is not None and found != digest:
        raise TransferError(f"the digest is {found} where {digest} was announced")
