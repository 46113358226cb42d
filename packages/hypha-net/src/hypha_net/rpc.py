"""Request and response: one CBOR message each way over a stream of its own, with a deadline and size limits.

The client writes its request and half-closes the stream; the response ends it. Each exchange is a
`hypha_proto.protocols.RpcMethod`. Works over any `Endpoint`.
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
from hypha_proto.texts import quote

_log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")
Handler = Callable[[PeerId, Req], Awaitable[Resp]]

READ_TIMEOUT: Final = 30.0
"""Seconds for a peer to send its request, and later to receive the response."""
MAX_CONCURRENT_READS: Final = 32
"""Maximum number of requests of one peer and protocol that are read at once; further ones wait."""


async def call(
    endpoint: Endpoint, peer: PeerId, method: RpcMethod[Req, Resp], message: Req, *, timeout: float = 10.0
) -> Resp:
    """Send a request to `peer` and return its response, within `timeout` seconds in all.

    Raises:
        UnreachableError: the peer cannot be reached.
        UnsupportedProtocolError: it does not speak the method's protocol.
        RequestTimeoutError: no complete response arrived in time.
        MessageTooLargeError: the request or the response exceeds the method's limit.
        RequestError: the stream was reset, or the response is malformed.
    """
    if instrumentation.current_traceparent() is None:
        return await _call(endpoint, peer, method, message, timeout)
    with instrumentation.span(_span_name(method), _span_attributes(method, peer), kind=instrumentation.SpanKind.CLIENT):
        return await _call(endpoint, peer, method, instrumentation.with_trace(message), timeout)


def _span_name(method: RpcMethod[Any, Any]) -> str:
    return method.variant or method.protocol.split("/")[1]


def _span_attributes(method: RpcMethod[Any, Any], peer: PeerId) -> instrumentation.Attributes:
    return {"rpc.system": "libp2p", "rpc.method": _span_name(method), "hypha.peer.id": str(peer)}


async def _call(endpoint: Endpoint, peer: PeerId, method: RpcMethod[Req, Resp], message: Req, timeout: float) -> Resp:
    data = method.encode_request(message)
    what = method.variant or method.protocol
    if len(data) > method.max_request:
        raise MessageTooLargeError(f"{what}: a request of {len(data)} bytes exceeds the limit, {method.max_request}")
    try:
        with anyio.fail_after(timeout):
            stream = await endpoint.open_stream(peer, [method.protocol], timeout=timeout, request=data)
            answer = await _read_answer(stream, method.max_response)
    except TimeoutError:
        raise RequestTimeoutError(f"{what} to {peer}: no answer within {timeout:g} s") from None
    except (StreamResetError, StreamClosedError) as error:
        raise RequestError(f"{what} to {peer}: {error or 'the stream ended before a response'}") from error
    try:
        return method.decode_response(answer)
    except DecodeError as error:
        raise RequestError(f"{what} to {peer}: the answer is malformed: {error}") from error


async def _read_answer(stream: Stream, limit: int) -> bytes:
    """Read the response; close the stream in every case."""
    done = False
    try:
        answer = await read_to_end(stream, limit)
        done = True
        return answer
    finally:
        with anyio.CancelScope(shield=True):
            await (stream.aclose() if done else stream.reset())


async def read_to_end(stream: Stream, limit: int) -> bytes:
    """Read until the peer half-closes the stream.

    Raises:
        MessageTooLargeError: more than `limit` bytes arrived.
        StreamResetError: the stream was reset.
    """
    parts: list[bytes] = []
    size = 0
    while part := await stream.receive_some(min(65536, limit + 1)):
        size += len(part)
        if size > limit:
            raise MessageTooLargeError(f"a message from {stream.peer} on {stream.protocol} exceeds {limit} bytes")
        parts.append(part)
    return b"".join(parts)


_Served = dict[str | None, tuple[RpcMethod[Any, Any], Handler[Any, Any]]]
_served: WeakKeyDictionary[Endpoint, dict[str, _Served]] = WeakKeyDictionary()


def serve(endpoint: Endpoint, method: RpcMethod[Req, Resp], handler: Handler[Req, Resp]) -> None:
    """Serve a method with `handler(peer, request)`; replaces an earlier handler of the method.

    When the handler raises, the stream is reset, which is a `RequestError` for the client. A request that cannot be
    decoded, or that the peer's role may not send (`ALLOWED_SENDERS`), is reset without calling the handler.
    """
    protocols = _served.setdefault(endpoint, {})
    if method.protocol not in protocols:
        protocols[method.protocol] = {}
        endpoint.handle(method.protocol, _stream_handler(endpoint, protocols[method.protocol]))
    protocols[method.protocol][method.variant] = (method, handler)


def _stream_handler(endpoint: Endpoint, served: _Served) -> Callable[[Stream], Awaitable[None]]:
    limiter = PerPeerLimiter(MAX_CONCURRENT_READS)

    async def read(stream: Stream) -> bytes:
        async with limiter.acquire(stream.peer):
            with anyio.fail_after(READ_TIMEOUT):
                return await read_to_end(stream, max(entry[0].max_request for entry in served.values()))

    async def answer(stream: Stream) -> None:
        try:
            data = await read(stream)
            method, handler = _find_handler(served, data)
            if not endpoint.is_authorized(stream.peer, method.name):
                await stream.reset()
                return
            request = method.decode_request(data)
        except (DecodeError, MessageTooLargeError, TimeoutError, StreamResetError) as error:
            _log.warning("request from %s on %s dropped: %s", stream.peer, stream.protocol, str(error) or "too slow")
            await stream.reset()
            return
        response = method.encode_response(await _call_handler(method, handler, stream.peer, request))
        try:
            with anyio.fail_after(READ_TIMEOUT):
                await stream.send_eof(response)
        except (StreamResetError, TimeoutError):
            _log.info("%s did not wait for its response on %s", stream.peer, stream.protocol)
            await stream.reset()

    return answer


async def _call_handler(
    method: RpcMethod[Any, Any], handler: Handler[Any, Any], peer: PeerId, request: object
) -> object:
    """Call the handler, as part of the request's trace."""
    with instrumentation.serving(_span_name(method), request, _span_attributes(method, peer)):
        return await handler(peer, request)


def _find_handler(served: _Served, data: bytes) -> tuple[RpcMethod[Any, Any], Handler[Any, Any]]:
    if None in served:
        return served[None]
    limit = max(entry[0].max_request for entry in served.values())
    name, _ = split_variant(data, limit)
    if name not in served:
        raise DecodeError(f"{quote(name)} is not served by this node")
    return served[name]
