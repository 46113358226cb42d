"""Looking for workers: the request that is gossiped and the offers that come back."""

from __future__ import annotations

import uuid
from typing import Annotated, Final, Literal

from hypha_proto.protocols import API, WORKER_REQUESTS_TOPIC, RpcMethod, Topic
from hypha_proto.resources import Resources, Timestamp
from hypha_proto.wire_schema import OMIT, U64, Amount, Message

ExecutorClass = Literal["train", "aggregate"]


class TrainExecutor(Message, frozen=True, tag="train", tag_field="class"):
    """An executor that trains, by the name that workers configure (``diloco-transformer``)."""

    name: str


class AggregateExecutor(Message, frozen=True, tag="aggregate", tag_field="class"):
    """An executor that aggregates (``parameter-server``)."""

    name: str


ExecutorDescriptor = TrainExecutor | AggregateExecutor


class WorkerSpec(Message, frozen=True):
    """What one worker must have."""

    resources: Resources
    executor: tuple[ExecutorDescriptor, ...]


class WorkerRequest(Message, frozen=True):
    """A scheduler looks for workers: gossiped on ``hypha/worker``, answered by `WorkerOffer`."""

    id: uuid.UUID
    spec: WorkerSpec
    timeout: Timestamp
    bid: Amount
    """Tokens per lease-hour."""
    timeout_ms: Annotated[U64 | None, OMIT] = None
    """How long offers are taken, milliseconds from receipt."""
    traceparent: Annotated[str | None, OMIT] = None


class WorkerOffer(Message, frozen=True):
    """A worker's answer: these resources at this price, held for a moment."""

    id: uuid.UUID
    """The temporary lease, which `RenewLease` takes."""
    request_id: uuid.UUID
    price: Amount
    resources: Resources
    timeout: Timestamp
    timeout_ms: Annotated[U64 | None, OMIT] = None
    """Life of the temporary lease, milliseconds from receipt."""
    traceparent: Annotated[str | None, OMIT] = None


class OfferReceived(Message, frozen=True):
    """The scheduler has the offer; whether it takes it shows by a renewal."""


WORKER_REQUESTS: Final = Topic[WorkerRequest](WORKER_REQUESTS_TOPIC, WorkerRequest)
OFFER: Final = RpcMethod[WorkerOffer, OfferReceived](API, WorkerOffer, OfferReceived, "WorkerOffer")

OFFER_WINDOW: Final = 5.0
"""Seconds for which offers are collected at most."""
REQUEST_BATCH_WINDOW: Final = 0.2
"""Seconds for which a worker batches requests before it decides."""
REQUEST_BATCH_SIZE: Final = 100
