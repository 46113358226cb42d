"""HTTP application: accepts metrics at ``POST /status``, one per request, and passes them to a sink.

The sink is `LogSink`, or `retry_queue.RetryQueue` to write to AIM.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId

if TYPE_CHECKING:
    from hypha_aim_driver.retry_queue import RetryQueue

_log = logging.getLogger(__name__)

MAX_BODY: Final = 64 << 10
"""Bytes of one metric."""


def _peer_id(text: str) -> str:
    return str(PeerId.parse(text))


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("contains non-printable characters")
    return text


class AimMetrics(BaseModel):
    """Metric of one worker, as posted by a scheduler's status bridge."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    worker_id: Annotated[str, AfterValidator(_peer_id)] = Field(description="The worker's peer id, base58 text.")
    round: int = Field(ge=0, lt=2**32, description="Number of the round that the value belongs to.")
    metric_name: Annotated[str, AfterValidator(_printable)] = Field(
        min_length=1, max_length=200, description="Name of the metric, such as loss or samples_per_second."
    )
    value: Annotated[float, Field(strict=False)] = Field(description="The value, single precision.")
    job_id: Annotated[str, AfterValidator(_printable)] | None = Field(
        default=None, min_length=1, max_length=200, description="Id of the job; some schedulers do not send it."
    )


class SinkFullError(Exception):
    """The sink is full; the client should retry later."""


class LogSink:
    """Sink that writes every metric to the log; used without an AIM repository."""

    def record(self, metric: AimMetrics) -> None:
        """Store a metric without blocking; called from the event loop. A full sink raises `SinkFullError`."""
        job = "" if metric.job_id is None else f"job {metric.job_id} "
        _log.info("%s%s round %d %s = %g", job, metric.worker_id, metric.round, metric.metric_name, metric.value)


async def _read_body(request: Request) -> bytes:
    """Return the body; HTTP 413 if it is longer than `MAX_BODY`, without reading the rest."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a metric is at most {MAX_BODY} bytes")
    return bytes(body)


def _parse_metric(body: bytes) -> AimMetrics:
    """Parse one metric; HTTP 422 with the reasons if it is malformed. The input is not repeated in the reasons."""
    try:
        return AimMetrics.model_validate(parse_json(body))
    except ValidationError as error:
        reasons = [
            {**each, "loc": ("body", *each["loc"])}
            for each in error.errors(include_input=False, include_context=False, include_url=False)
        ]
        raise HTTPException(422, reasons) from None
    except DecodeError as error:
        raise HTTPException(422, [{"type": "json_invalid", "loc": ("body",), "msg": str(error)}]) from None


def _request_schema() -> dict[str, Any]:
    content = {"application/json": {"schema": AimMetrics.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def create_app(sink: LogSink | RetryQueue) -> FastAPI:
    """Create the application with the route ``POST /status``.

    A malformed metric gets the response 422 with the reasons, one of more than `MAX_BODY` bytes 413; a full sink leads
    to 503.
    """
    app = FastAPI(title="hypha-aim-driver", summary="Accepts metrics of a Hypha scheduler.")

    @app.post("/status", openapi_extra=_request_schema())
    async def status(request: Request) -> dict[str, str]:
        sink.record(_parse_metric(await _read_body(request)))
        return {"status": "ok"}

    @app.exception_handler(SinkFullError)
    async def full(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "full", "detail": str(error)}, status_code=503, headers={"Retry-After": "5"})

    return app
