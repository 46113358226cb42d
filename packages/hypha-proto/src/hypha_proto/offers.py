"""Worker allocation: the gossiped request for workers and the offers that answer it."""

from __future__ import annotations

import uuid
from typing import Annotated, Final

from hypha_proto.protocols import API, WORKER_REQUESTS_TOPIC, RpcMethod, Topic
from hypha_proto.resources import Resources
from hypha_proto.texts import shorten
from hypha_proto.wire_schema import OMIT, U64, Message, Price


class ExecutorDescriptor(Message, frozen=True, rename={"kind": "class"}):
    """Executor, named as in the workers' configuration (for example ``train`` and ``diloco-transformer``)."""

    kind: str
    """Its class; empty where one of any class with this name will do."""
    name: str

    @classmethod
    def parse(cls, text: str) -> ExecutorDescriptor:
        """Return the executor of a text ``class/name``, or ``name`` for one of any class."""
        kind, _, name = text.rpartition("/")
        return cls(kind, name)

    def __str__(self) -> str:
        return shorten(f"{self.kind}/{self.name}" if self.kind else self.name, 160)


class WorkerSpec(Message, frozen=True):
    """Requirements on one worker."""

    resources: Resources
    """Minimum amounts."""
    executor: tuple[ExecutorDescriptor, ...]
    """Executors that the worker must have."""


class WorkerRequest(Message, frozen=True):
    """Request of a scheduler for workers; published on the topic ``hypha/worker``, answered by `WorkerOffer`."""

    id: uuid.UUID
    spec: WorkerSpec
    bid: Price
    """Price in tokens per lease-hour."""
    timeout_ms: U64
    """Length of the offer window in milliseconds from receipt."""
    traceparent: Annotated[str | None, OMIT] = None


class WorkerOffer(Message, frozen=True):
    """Offer of a worker: resources at a price, reserved by a temporary lease."""

    id: uuid.UUID
    """Id of the temporary lease; `leases.RenewLease` accepts the offer."""
    request_id: uuid.UUID
    """Id of the `WorkerRequest` that it answers."""
    price: Price
    """Price in tokens per lease-hour."""
    resources: Resources
    timeout_ms: U64
    """Life of the temporary lease in milliseconds from receipt."""
    traceparent: Annotated[str | None, OMIT] = None


class OfferReceived(Message, frozen=True):
    """Acknowledgement of an offer. The scheduler accepts the offer by renewing its lease."""


WORKER_REQUESTS: Final = Topic[WorkerRequest](WORKER_REQUESTS_TOPIC, WorkerRequest)
OFFER: Final = RpcMethod(API, WorkerOffer, OfferReceived, "WorkerOffer")

OFFER_WINDOW: Final = 5.0
"""Maximum time in seconds for which offers are collected."""
MAX_OFFER_LIFE: Final = 2.0
"""Seconds of an offer's stated life that count at most."""
REQUEST_BATCH_WINDOW: Final = 0.2
"""Time in seconds for which a worker collects requests before it decides."""
REQUEST_BATCH_SIZE: Final = 100
"""Number of collected requests at which a worker decides at once."""
