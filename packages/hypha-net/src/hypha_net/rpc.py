"""Ask one peer: one message there, one back, over a stream of its own, with a deadline and size limits.

The sender writes one CBOR value and ends its sending side; the answer ends the stream. Which messages exist is
`hypha_proto`'s business; this room moves them over any `Endpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import anyio

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import (
    MessageTooLargeError,
    RequestError,
    RequestTimeoutError,
    StreamClosedError,
    StreamResetError,
)
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import RpcMethod, split_variant

_log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")
Handler = Callable[[PeerId, Req], Awaitable[Resp]]

READ_TIMEOUT: Final = 30.0
"""Seconds within which a peer that asks must have written its request, and later have taken the answer."""
READ_AT_ONCE: Final = 32
"""Requests of one peer and protocol of which a part has come; the others wait."""


async def call(
    endpoint: Endpoint, peer: PeerId, conversation: RpcMethod[Req, Resp], message: Req, *, timeout: float = 10.0
) -> Resp:
    """Ask `peer` and wait for its answer, `timeout` seconds in all.

    Raises:
        UnreachableError: the peer cannot be reached.
        UnsupportedProtocolError: it does not speak the conversation's protocol.
        RequestTimeoutError: no whole answer came in time.
        MessageTooLargeError: the request or the answer is over the conversation's limit.
        RequestError: the stream broke off, or the answer is not what the conversation says.
    """
    if instrumentation.current_traceparent() is None:
        return await _call(endpoint, peer, conversation, message, timeout)
    with instrumentation.span(_name(conversation), _about(conversation, peer), kind="client"):
        return await _call(endpoint, peer, conversation, instrumentation.with_trace(message), timeout)


def _name(conversation: RpcMethod[Any, Any]) -> str:
    return conversation.variant or conversation.protocol.split("/")[1]


def _about(conversation: RpcMethod[Any, Any], peer: PeerId) -> instrumentation.Attributes:
    return {"rpc.system": "libp2p", "rpc.method": _name(conversation), "hypha.peer.id": str(peer)}


async def _call(
    endpoint: Endpoint, peer: PeerId, conversation: RpcMethod[Req, Resp], message: Req, timeout: float
) -> Resp:
    data = conversation.encode_request(message)
    what = conversation.variant or conversation.protocol
    if len(data) > conversation.max_request:
        raise MessageTooLargeError(
            f"{what}: a request of {len(data)} bytes is over the limit, {conversation.max_request}"
        )
    try:
        with anyio.fail_after(timeout):
            stream = await endpoint.open_stream(peer, [conversation.protocol], timeout=timeout, request=data)
            answer = await _read_answer(stream, conversation.max_response)
    except TimeoutError:
        raise RequestTimeoutError(f"{what} to {peer}: no answer within {timeout:g} s") from None
    except (StreamResetError, StreamClosedError) as error:
        raise RequestError(f"{what} to {peer}: {error or 'the stream broke off before an answer'}") from error
    try:
        return conversation.decode_response(answer)
    except DecodeError as error:
        raise RequestError(f"{what} to {peer}: the answer is malformed: {error}") from error


async def _read_answer(stream: Stream, limit: int) -> bytes:
    """Read the answer; the stream is gone in every case."""
    done = False
    try:
        answer = await read_to_end(stream, limit)
        done = True
        return answer
    finally:
        with anyio.CancelScope(shield=True):
            await (stream.aclose() if done else stream.reset())


async def read_to_end(stream: Stream, limit: int) -> bytes:
    """Read until the peer ends its side.

    Raises:
        MessageTooLargeError: more than `limit` bytes came.
        StreamResetError: the stream broke off.
    """
    parts: list[bytes] = []
    size = 0
    while part := await stream.receive_some(min(65536, limit + 1)):
        size += len(part)
        if size > limit:
            raise MessageTooLargeError(f"a message from {stream.peer} on {stream.protocol} is over {limit} bytes")
        parts.append(part)
    return b"".join(parts)


_Served = dict[str | None, tuple[RpcMethod[Any, Any], Handler[Any, Any]]]
_served: WeakKeyDictionary[Endpoint, dict[str, _Served]] = WeakKeyDictionary()


def serve(endpoint: Endpoint, conversation: RpcMethod[Req, Resp], handler: Handler[Req, Resp]) -> None:
    """Answer a conversation with `handler(peer, request)`; a second call replaces the first handler.

    A handler that raises leaves the asking peer with a broken stream, which is a `RequestError` there; a request that
    cannot be decoded, or that is not for a peer of that role to make (`SENDERS`), never reaches it and is reset.
    """
    protocols = _served.setdefault(endpoint, {})
    if conversation.protocol not in protocols:
        protocols[conversation.protocol] = {}
        endpoint.handle(conversation.protocol, _answer_with(endpoint, protocols[conversation.protocol]))
    protocols[conversation.protocol][conversation.variant] = (conversation, handler)


def _answer_with(endpoint: Endpoint, served: _Served) -> Callable[[Stream], Awaitable[None]]:
    turns = PerPeerLimiter(READ_AT_ONCE)

    async def read(stream: Stream) -> bytes:
        async with turns.acquire(stream.peer):
            with anyio.fail_after(READ_TIMEOUT):
                return await read_to_end(stream, max(entry[0].max_request for entry in served.values()))

    async def answer(stream: Stream) -> None:
        try:
            data = await read(stream)
            conversation, handler = _find(served, data)
            if not endpoint.is_authorized(stream.peer, conversation.name):
                await stream.reset()
                return
            request = conversation.decode_request(data)
        except (DecodeError, MessageTooLargeError, TimeoutError, StreamResetError) as error:
            _log.warning("request from %s on %s dropped: %s", stream.peer, stream.protocol, str(error) or "too slow")
            await stream.reset()
            return
        response = conversation.encode_response(await _handle(conversation, handler, stream.peer, request))
        try:
            with anyio.fail_after(READ_TIMEOUT):
                await stream.send_eof(response)
        except (StreamResetError, TimeoutError):
            _log.info("%s asked on %s and did not wait for the answer", stream.peer, stream.protocol)
            await stream.reset()

    return answer


async def _handle(
    conversation: RpcMethod[Any, Any], handler: Handler[Any, Any], peer: PeerId, request: object
) -> object:
    """Let the handler answer, as part of the trace that the request names."""
    with instrumentation.serving(_name(conversation), request, _about(conversation, peer)):
        return await handler(peer, request)


def _find(served: _Served, data: bytes) -> tuple[RpcMethod[Any, Any], Handler[Any, Any]]:
    if None in served:
        return served[None]
    limit = max(entry[0].max_request for entry in served.values())
    name, _ = split_variant(data, limit)
    if name not in served:
        raise DecodeError(f"{name[:60]!r} is not asked of this node")
    return served[name]
