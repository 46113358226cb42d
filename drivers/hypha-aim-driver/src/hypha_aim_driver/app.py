"""HTTP application: accepts metrics at ``POST /status``, one per request, and passes them to a sink.

Called by a scheduler's status bridge. The sink is `LogSink`, or `retry_queue.RetryQueue` to write to AIM.
"""

from __future__ import annotations

import logging
from typing import Annotated, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)


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


class Sink(Protocol):
    """Destination of metrics."""

    def record(self, metric: AimMetrics) -> None:
        """Store a metric without blocking; called from the event loop.

        Raises:
            SinkFullError: the metric was not stored.
        """
        ...


class LogSink:
    """Sink that writes every metric to the log; used without an AIM repository."""

    def record(self, metric: AimMetrics) -> None:
        """See `Sink.record`."""
        job = "" if metric.job_id is None else f"job {metric.job_id} "
        _log.info("%s%s round %d %s = %g", job, metric.worker_id, metric.round, metric.metric_name, metric.value)


def create_app(sink: Sink) -> FastAPI:
    """Create the application with the route ``POST /status``.

    A malformed metric gets the response 422 with the reasons; a full sink leads to 503.
    """
    app = FastAPI(title="hypha-aim-driver", summary="Accepts metrics of a Hypha scheduler.")

    @app.post("/status")
    async def status(metric: AimMetrics) -> dict[str, str]:
        sink.record(metric)
        return {"status": "ok"}

    @app.exception_handler(SinkFullError)
    async def full(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "full", "detail": str(error)}, status_code=503, headers={"Retry-After": "5"})

    return app
