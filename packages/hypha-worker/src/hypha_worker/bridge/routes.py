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

from hypha_proto.batch_reports import BatchesCounted, TrainedBatches
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
    ProgressUpdate,
    ReceivedFile,
    RoundJoined,
    SpanReport,
    Transfer,
    read_progress_update,
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

_DESCRIBED: Final = (Transfer, TrainedBatches, ProgressUpdate, SpanReport, BridgeErrorBody)
"""Types of bodies in the description."""
_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_ERROR: Final = {"description": "The error.", "content": {"application/json": {"schema": _reference(BridgeErrorBody)}}}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = dict.fromkeys(
    (400, 403, 404, 409, 410, 413, 500, 502, 503, 504, 507), _ERROR
)


class BridgeApp(FastAPI):
    """The application; its description has the schemas of the messages."""

    def openapi(self) -> dict[str, Any]:
        """Return the description."""
        template = "#/components/schemas/{name}"
        _, schemas = msgspec.json.schema_components(_DESCRIBED, schema_hook=_schema_of, ref_template=template)
        return {**super().openapi(), "components": {"schemas": schemas}}


def _schema_of(_kind: type) -> dict[str, Any]:
    """Return the schema of peer ids, the only type of ours that is no message."""
    return {"type": "string"}


def make_app(backend: BridgeBackend, call: Call) -> FastAPI:
    """Make the application that serves one job's bridge."""
    app = BridgeApp(title="Hypha job bridge", version="1", docs_url=None, redoc_url=None)
    app.add_exception_handler(BridgeError, _error_response)

    async def fetch(request: Request) -> Response:
        """Fetch what a reference names into the work directory; for a scheduler's data set, the next slices."""
        wanted = await _read_transfer(request, "fetch")
        files = await _while_connected(request, call(backend.fetch, wanted))
        return JSONResponse([to_plain(FetchedFile, file) for file in files])

    async def send(request: Request) -> Response:
        """Push a file to the peers of a reference, or store an output of a task; answer when that is complete."""
        return _json(await call(backend.send, await _read_transfer(request, "send")))

    async def receive(request: Request) -> Response:
        """Stream server-sent events, one for each file that a peer of the reference pushed to this job."""
        wanted = await _read_transfer(request, "receive")
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
        return _json(await call(backend.update_progress, await _read(request, "update", read_progress_update)))

    async def spans(request: Request) -> Response:
        """Record the executor's spans in the trace of its job; answer with how many were recorded."""
        report = await _read(request, "spans", read_spans)
        return _json({"recorded": await call(backend.record_spans, report)})

    _add(app, FETCH, fetch, _reference(Transfer))
    _add(app, SEND, send, _reference(Transfer))
    _add(app, RECEIVE, receive, _reference(Transfer))
    _add(app, STATUS, status, {"oneOf": [{"type": "string"}, _ANY_OBJECT]})
    _add(app, BATCHES, batches, _reference(TrainedBatches))
    _add(app, JOIN, join, _ANY_OBJECT)
    _add(app, UPDATE, update, _reference(ProgressUpdate))
    _add(app, SPANS, spans, _reference(SpanReport))
    return app


def _add(app: FastAPI, path: str, route: Callable[[Request], Awaitable[Response]], body: dict[str, Any]) -> None:
    description = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
    app.add_api_route(
        path, route, methods=["POST"], response_model=None, openapi_extra=description, responses=_RESPONSES
    )


async def _events(backend: BridgeBackend, call: Call, wanted: Transfer) -> AsyncIterator[bytes]:
    """Yield one event per file. A closed stream waits for none, so that it loses none."""
    try:
        while (file := await call(backend.receive, wanted)) is not None:
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


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _read(request: Request, what: str, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(await _read_body(request))
    except DecodeError as error:
        raise bad_request(f"{what}: {error}") from None


async def _read_transfer(request: Request, action: str) -> Transfer:
    return await _read(request, action, lambda data: read_transfer(action, parse_json(data)))


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
