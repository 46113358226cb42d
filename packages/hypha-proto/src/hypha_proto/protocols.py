"""RPC methods and gossip topics: protocol ids, message types, size limits, and the roles that may send each message.

`hypha_net.rpc` and `hypha_net.pubsub` send these messages. The module of each topic, such as `leases`, defines one
`RpcMethod` per exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from hypha_proto.codec import from_cbor, parse_cbor, to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.texts import quote
from hypha_proto.wire_schema import CBOR, compile_shape

MAX_REQUEST: Final = 1 << 20
"""Default limit of an encoded request in bytes."""
MAX_RESPONSE: Final = 10 << 20
"""Default limit of an encoded response in bytes."""

Req = TypeVar("Req")
Resp = TypeVar("Resp")


@dataclass(frozen=True)
class RpcMethod(Generic[Req, Resp]):
    """One kind of request/response exchange.

    Several methods may share a protocol id. Then request and response are each wrapped in a map with one entry, whose
    key is `variant`.
    """

    protocol: str
    """libp2p protocol id."""
    request: type[Req]
    """Annotated type of the request."""
    response: type[Resp]
    """Annotated type of the response."""
    variant: str | None = None
    """Key of the wrapping map, or None if the method does not share its protocol id."""
    max_request: int = MAX_REQUEST
    """Limit of an encoded request in bytes."""
    max_response: int = MAX_RESPONSE
    """Limit of an encoded response in bytes."""

    @property
    def name(self) -> str:
        """Key of this method in `ALLOWED_SENDERS`."""
        return self.variant or self.protocol

    def encode_request(self, message: Req) -> bytes:
        """Encode a request.

        Raises:
            EncodeError: `message` is not of the request type.
        """
        return self._encode(self.request, message)

    def encode_response(self, message: Resp) -> bytes:
        """Encode a response.

        Raises:
            EncodeError: `message` is not of the response type.
        """
        return self._encode(self.response, message)

    def decode_request(self, data: bytes) -> Req:
        """Decode a request.

        Raises:
            DecodeError: `data` is over `max_request` bytes or not a valid request.
        """
        request: Req = self._decode(self.request, data, self.max_request)
        return request

    def decode_response(self, data: bytes) -> Resp:
        """Decode a response.

        Raises:
            DecodeError: `data` is over `max_response` bytes or not a valid response.
        """
        response: Resp = self._decode(self.response, data, self.max_response)
        return response

    def _encode(self, kind: Any, message: object) -> bytes:
        if self.variant is None:
            return to_cbor(kind, message)
        return to_cbor(dict[str, kind], {self.variant: message})

    def _decode(self, kind: Any, data: bytes, limit: int) -> Any:
        if self.variant is None:
            return from_cbor(kind, data, limit)
        name, payload = split_variant(data, limit)
        if name != self.variant:
            raise DecodeError(f"expected {self.variant}, got {quote(name)}")
        return compile_shape(kind).load(payload, name, CBOR)


def split_variant(data: bytes, limit: int) -> tuple[str, object]:
    """Split a message of a protocol that several methods share into the variant's name and the undecoded payload.

    Raises:
        DecodeError: the message is over `limit` bytes or not a map with one entry and a text key.
    """
    plain = parse_cbor(data, limit)
    if type(plain) is not dict or len(plain) != 1:
        raise DecodeError("expected a map with one entry, whose key is the name of the message")
    [(name, payload)] = plain.items()
    if type(name) is not str:
        raise DecodeError("the name of the message is not text")
    return name, payload


@dataclass(frozen=True)
class Topic(Generic[Req]):
    """A gossip topic and the type of its messages."""

    name: str
    message: Any
    """Annotated type of the messages."""
    max_bytes: int = 64 << 10
    """Limit of an encoded message."""

    def encode(self, message: Req) -> bytes:
        """Encode a message.

        Raises:
            EncodeError: `message` is not of the topic's type.
        """
        return to_cbor(self.message, message)

    def decode(self, data: bytes) -> Req:
        """Decode a message.

        Raises:
            DecodeError: `data` is over `max_bytes` or not a valid message.
        """
        made: Req = from_cbor(self.message, data, self.max_bytes)
        return made


API: Final = "/hypha-api/0.0.1"
HEALTH: Final = "/hypha-health/0.0.1"
PROGRESS: Final = "/hypha-progress/0.0.1"
BATCH_REPORTS: Final = "/hypha-progress/0.1.0"
LEASE: Final = "/hypha-lease/0.1.0"
GOODBYE: Final = "/hypha-goodbye/0.1.0"
DRAIN: Final = "/hypha-drain/0.1.0"
LOGS: Final = "/hypha-logs/0.1.0"
WORKER: Final = "/hypha-worker/0.1.0"
AGGREGATE: Final = "/hypha-aggregate/0.1.0"
ROUND: Final = "/hypha-round/0.1.0"
MEMBERSHIP: Final = "/hypha-membership/0.1.0"
DIRECTORY: Final = "/hypha-directory/0.1.0"
TASKS: Final = "/hypha-task/0.1.0"
TASK_RESOURCES: Final = "/hypha-resource/0.1.0"
PULL: Final = "/hypha-tensor-stream/pull/0.1.0"
PUSH: Final = "/hypha-tensor-stream/push/0.1.0"
IDENTIFY_VERSION: Final = "/hypha-identify/0.0.1"

Role = Literal["gateway", "scheduler", "worker", "data"]
"""Role of a node, as stated in its certificate."""

WORKER_REQUESTS_TOPIC: Final = "hypha/worker"
DATASET_RECORD: Final = "dataset record"
CIRCUIT_OFFER: Final = "/libp2p/circuit/relay/0.2.0/stop"
"""Protocol by which a relay opens a circuit to its destination (https://github.com/libp2p/specs/tree/master/relay)."""

_SCHEDULER: Final[frozenset[Role]] = frozenset({"scheduler"})
_WORKER: Final[frozenset[Role]] = frozenset({"worker"})
_TRAINING: Final[frozenset[Role]] = _SCHEDULER | _WORKER

ALLOWED_SENDERS: Final[Mapping[str, frozenset[Role]]] = {
    # gossip, by topic
    WORKER_REQUESTS_TOPIC: _SCHEDULER,
    # requests, by variant or, where a protocol has a single method, by protocol id
    "WorkerOffer": _WORKER,
    "RenewLease": _SCHEDULER,
    "ReleaseLease": _SCHEDULER,
    "WhyNot": _SCHEDULER,
    "Data": _WORKER,
    "UpdateRefused": _WORKER,
    "StateContribution": _WORKER,
    "AwaitCommit": _WORKER,
    "JoinRound": _WORKER,
    PROGRESS: _WORKER,
    "ReportBatches": _WORKER,
    GOODBYE: _WORKER,
    TASKS: _WORKER,
    "LocateResource": _WORKER,
    "PushOutput": _SCHEDULER,
    "ReleaseOutputs": _SCHEDULER,
    DRAIN: _WORKER,
    DIRECTORY: _SCHEDULER | {"data"},
    "ListLogs": _SCHEDULER,
    "ReadLog": _SCHEDULER,
    WORKER: _SCHEDULER,
    # files, by protocol id: workers pull slices and results, schedulers manifests and results; either pushes
    PULL: _TRAINING,
    PUSH: _TRAINING,
    # DHT records, and circuits of the relay
    DATASET_RECORD: frozenset({"data"}),
    CIRCUIT_OFFER: frozenset({"gateway"}),
}
"""Roles that may send each message, by the role in the sender's certificate.

Messages that are not listed are accepted from every peer: health checks, identify, ping, DHT look-ups and relay
reservations. A parameter server has the role of a worker.
"""
