"""The HTTP side: a scheduler posts one metric at a time to ``/status``, and a sink keeps it."""

from __future__ import annotations

import logging
from typing import Annotated, Protocol

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)


def _peer_id(text: str) -> str:
    return str(PeerId.parse(text))


class AimMetrics(BaseModel):
    """One metric of one worker, as a scheduler's status bridge posts it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    worker_id: Annotated[str, AfterValidator(_peer_id)] = Field(description="The worker's peer id, base58 text.")
    round: int = Field(ge=0, lt=2**32, description="The synchronisation round that the value belongs to.")
    metric_name: str = Field(min_length=1, max_length=200, description="Such as loss or samples_per_second.")
    value: Annotated[float, Field(strict=False)] = Field(description="The value, single precision.")


class Sink(Protocol):
    """Where metrics go."""

    def record(self, metric: AimMetrics) -> None:
        """Keep one metric. Called from worker threads, one at a time."""
        ...


class LogSink:
    """Writes every metric to the log: what is left when no AIM repository is named."""

    def record(self, metric: AimMetrics) -> None:
        """See `Sink.record`."""
        _log.info("%s round %d %s = %g", metric.worker_id, metric.round, metric.metric_name, metric.value)


def create_app(sink: Sink) -> FastAPI:
    """The application: ``POST /status`` takes a metric, a malformed one is answered by 422 and the reasons."""
    app = FastAPI(title="hypha-aim-driver", summary="Takes a Hypha scheduler's metrics.")

    @app.post("/status")
    async def status(metric: AimMetrics) -> dict[str, str]:
        sink.record(metric)
        return {"status": "ok"}

    return app
