"""The HTTP side: a scheduler posts one metric at a time to ``/status``, and a sink keeps it.

What comes before is a scheduler's status bridge; what comes after is `LogSink`, or `delivery` on the way to AIM.
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
        raise ValueError("has characters that cannot be printed")
    return text


class AimMetrics(BaseModel):
    """One metric of one worker, as a scheduler's status bridge posts it."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    worker_id: Annotated[str, AfterValidator(_peer_id)] = Field(description="The worker's peer id, base58 text.")
    round: int = Field(ge=0, lt=2**32, description="The synchronisation round that the value belongs to.")
    metric_name: Annotated[str, AfterValidator(_printable)] = Field(
        min_length=1, max_length=200, description="Such as loss or samples_per_second."
    )
    value: Annotated[float, Field(strict=False)] = Field(description="The value, single precision.")
    job_id: Annotated[str, AfterValidator(_printable)] | None = Field(
        default=None, min_length=1, max_length=200, description="The job; not every scheduler names it."
    )


class SinkFullError(Exception):
    """A sink can keep no more just now; whoever posts should try again later."""


class Sink(Protocol):
    """Where metrics go."""

    def record(self, metric: AimMetrics) -> None:
        """Keep one metric, at once: called from the event loop.

        Raises:
            SinkFullError: it was not kept.
        """
        ...


class LogSink:
    """Writes every metric to the log: what is left when no AIM repository is named."""

    def record(self, metric: AimMetrics) -> None:
        """See `Sink.record`."""
        job = "" if metric.job_id is None else f"job {metric.job_id} "
        _log.info("%s%s round %d %s = %g", job, metric.worker_id, metric.round, metric.metric_name, metric.value)


def create_app(sink: Sink) -> FastAPI:
    """The application: ``POST /status`` takes a metric.

    A malformed one is answered by 422 and the reasons, one that the sink has no room for by 503.
    """
    app = FastAPI(title="hypha-aim-driver", summary="Takes a Hypha scheduler's metrics.")

    @app.post("/status")
    async def status(metric: AimMetrics) -> dict[str, str]:
        sink.record(metric)
        return {"status": "ok"}

    @app.exception_handler(SinkFullError)
    async def full(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "full", "detail": str(error)}, status_code=503, headers={"Retry-After": "5"})

    return app
