"""The bridge's HTTP routes, as a FastAPI application with a description at ``/openapi.json``.

Runs in the bridge's thread (`server`). Each route decodes a body strictly with `hypha_proto.bridge_api`, calls
`backend` on the worker's event loop, and answers with JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from hypha_proto.batch_reports import MAX_BATCHES, BatchesCounted, TrainedBatches
from hypha_proto.bridge_api import (
    BATCHES,
    FETCH,
    JOIN,
    RECEIVE,
    SEND,
    SPANS,
    STATUS,
    UPDATE,
    BridgeErrorBody,
    FetchedFile,
    ProgressUpdateAnswer,
    ReceivedFile,
    ResourceTransfer,
    RoundJoined,
    Transfer,
    read_progress_update,
    read_resource_transfer,
    read_spans,
    read_transfer,
)
from hypha_proto.codec import from_json, parse_json, to_json, to_plain
from hypha_proto.errors import DecodeError
from hypha_proto.training_reports import ReportAnswer, TrainingReportValue
from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.errors import BridgeError, bad_request

_log = logging.getLogger(__name__)

MAX_BODY: Final = 1 << 20
"""Largest request body, bytes."""

_NO_ROUNDS: Final = "a task has no rounds to report, use /task/update"

T = TypeVar("T")
Call = Callable[..., Awaitable[Any]]
"""Calls an async function on the worker's event loop: `call(function, *args)`."""

_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}
_TRANSFER_BODY: Final = {
    "required": ["resource", "path"],
    "properties": {
        "resource": {
            **_ANY_OBJECT,
            "description": "A reference: uri, huggingface, peers or scheduler; for a task Resource with the name of a "
            "resource to fetch or an output to send.",
        },
        "path": {"type": "string", "description": "File or folder, relative to the work directory."},
        "round": {"type": "integer", "minimum": 0},
        "samples": {"type": "integer", "minimum": 0, "description": "Weight of a pseudo-gradient."},
        "contribution": {
            **_ANY_OBJECT,
            "description": "What a pseudo-gradient was computed from: round, weights, ranges, batches, batch_size, "
            "seed, optimizer and update.",
        },
    },
    "type": "object",
}
_BATCHES_BODY: Final = {
    "required": ["round", "first", "batches"],
    "properties": {
        "round": {"type": "integer", "minimum": 0},
        "first": {"type": "integer", "minimum": 0, "description": "Batches of the round before these."},
        "batches": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_BATCHES,
            "items": {
                **_ANY_OBJECT,
                "description": "batch_size; slices: samples taken from each; batch_ms and wait_ms.",
            },
        },
    },
    "type": "object",
}
_SPAN: Final = {
    "required": ["name", "ago_ms", "duration_ms"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 64},
        "ago_ms": {"type": "number", "minimum": 0, "description": "Time from its start to this report."},
        "duration_ms": {"type": "number", "minimum": 0},
        "attributes": {**_ANY_OBJECT, "maxProperties": 32, "description": "Strings, numbers, booleans."},
        "error": {"type": "string", "maxLength": 300},
        "inside": {"type": "array", "items": _ANY_OBJECT, "description": "Nested spans."},
    },
    "type": "object",
}
_SPANS_BODY: Final = {
    "required": ["spans"],
    "properties": {"spans": {"type": "array", "items": _SPAN}, "traceparent": {"type": "string"}},
    "type": "object",
}
_UPDATE_BODY: Final = {
    "properties": {
        "fraction": {"type": "number", "minimum": 0, "maximum": 1, "description": "Share of the work that is done."},
        "message": {"type": "string", "maxLength": 1000, "description": "One line for people."},
        "metrics": {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 100},
    },
    "type": "object",
}
_ERROR: Final = {
    "description": "The error.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error", "detail"],
                "properties": {"error": {"type": "string"}, "detail": {"type": "string"}},
            }
        }
    },
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = dict.fromkeys(
    (400, 403, 404, 409, 410, 413, 500, 502, 503, 504, 507), _ERROR
)


def make_app(backend: BridgeBackend, call: Call) -> FastAPI:
    """Make the application that serves one job's bridge."""
    app = FastAPI(title="Hypha job bridge", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(BridgeError, _error_response)

    async def fetch(request: Request) -> Response:
        """Fetch what a reference names into the work directory; for a scheduler's data set, the next slice."""
        wanted = await _read_transfer(request, "fetch")
        function = backend.fetch_resource if isinstance(wanted, ResourceTransfer) else backend.fetch
        files = await _while_connected(request, call(function, wanted))
        return JSONResponse([to_plain(FetchedFile, file) for file in files])

    async def send(request: Request) -> Response:
        """Push a file to the peers of a reference, or store an output of a task; answer when that is complete."""
        wanted = await _read_transfer(request, "send")
        if isinstance(wanted, ResourceTransfer):
            return JSONResponse(await call(backend.send_resource, wanted))
        sent = await call(backend.send, wanted)
        return JSONResponse({"sent": sent.sent, "round": sent.round, "size": sent.size, "checksum": sent.checksum})

    async def receive(request: Request) -> Response:
        """Stream server-sent events, one for each file that a peer of the reference pushed to this job."""
        wanted = await _read_peer_transfer(request, "receive")
        await call(backend.check_receive, wanted)  # errors are answered with a status before the stream begins
        return StreamingResponse(_events(backend, call, wanted), media_type="text/event-stream")

    async def status(request: Request) -> Response:
        """Report progress to the scheduler; answer with the scheduler's response."""
        progress = await _read(request, "progress", partial(from_json, TrainingReportValue))
        answer = await call(backend.training(_NO_ROUNDS).report, progress)
        return Response(to_json(ReportAnswer, answer), media_type="application/json")

    async def batches(request: Request) -> Response:
        """Report trained batches; answer how many need not be reported again, and how many the round has."""
        trained = await _read(request, "batches", partial(from_json, TrainedBatches))
        counted = await call(backend.training(_NO_ROUNDS).report_batches, trained)
        return Response(to_json(BatchesCounted, counted), media_type="application/json")

    async def join(request: Request) -> Response:
        """Ask with which round the executor begins; answer when the scheduler has decided."""
        await _read_body(request)
        joined = await _while_connected(request, call(backend.training("a task has no rounds to join").join_round))
        return JSONResponse(to_plain(RoundJoined, joined))

    async def update(request: Request) -> Response:
        """Report progress of a task; answer whether it drains, and how long it still has."""
        answer: ProgressUpdateAnswer = await call(
            backend.update_progress, await _read(request, "update", read_progress_update)
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def spans(request: Request) -> Response:
        """Record the executor's spans in the trace of its job; answer with how many were recorded."""
        report = await _read(request, "spans", read_spans)
        return JSONResponse({"recorded": await call(backend.record_spans, report)})

    _add(app, FETCH, fetch, _TRANSFER_BODY)
    _add(app, SEND, send, _TRANSFER_BODY)
    _add(app, RECEIVE, receive, _TRANSFER_BODY)
    _add(app, STATUS, status, {"oneOf": [{"type": "string"}, _ANY_OBJECT]})
    _add(app, BATCHES, batches, _BATCHES_BODY)
    _add(app, JOIN, join, _ANY_OBJECT)
    _add(app, UPDATE, update, _UPDATE_BODY)
    _add(app, SPANS, spans, _SPANS_BODY)
    return app


def _add(app: FastAPI, path: str, route: Callable[[Request], Awaitable[Response]], body: dict[str, Any]) -> None:
    description = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    app.add_api_route(
        path, route, methods=["POST"], response_model=None, openapi_extra=description, responses=_RESPONSES
    )


async def _events(backend: BridgeBackend, call: Call, wanted: Transfer) -> AsyncIterator[bytes]:
    """Yield one event per file. A file is claimed just before it is written, so that a closed stream loses none."""
    try:
        while (pending := await call(backend.next_pending_file, wanted)) is not None:
            file = await call(backend.claim_file, wanted, pending)
            if file is not None:
                yield b"data: " + to_json(ReceivedFile, file) + b"\n\n"
    except BridgeError as error:  # too late for a status: the stream ends
        _log.info("a stream of received files ended: %s", error.detail)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work` for a request whose body was read; cancel it when the executor disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise bad_request("the executor disconnected before the answer")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _error_response(_request: Request, error: Exception) -> Response:
    if not isinstance(error, BridgeError):
        raise error
    _log.info("bridge answered %d %s: %s", error.status, error.kind, error.detail)
    body = BridgeErrorBody(error=error.kind, detail=error.detail)
    return Response(to_json(BridgeErrorBody, body), status_code=error.status, media_type="application/json")


async def _read(request: Request, what: str, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(await _read_body(request))
    except DecodeError as error:
        raise bad_request(f"{what}: {error}") from None


async def _read_transfer(request: Request, action: str) -> Transfer | ResourceTransfer:
    def decode(data: bytes) -> Transfer | ResourceTransfer:
        body = parse_json(data)
        return read_resource_transfer(action, body) or read_transfer(action, body)

    return await _read(request, action, decode)


async def _read_peer_transfer(request: Request, action: str) -> Transfer:
    wanted = await _read_transfer(request, action)
    if isinstance(wanted, ResourceTransfer):
        raise bad_request(f"{action}: a resource cannot be received, only files of peers")
    return wanted


async def _read_body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY:
                raise BridgeError(413, "too-large", f"the body exceeds {MAX_BODY} bytes")
    except ClientDisconnect:  # the executor was ended while it sent; nothing reads the answer
        raise bad_request("the executor disconnected before the end of its request") from None
    return b"".join(parts)
