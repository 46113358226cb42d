"""A conversation: which protocol carries it, what is asked, what is answered, how large either may be, and who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from hypha_proto.codec import Floats, from_cbor, parse_cbor, to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.wire_schema import CBOR, compile_shape

MAX_REQUEST: Final = 1 << 20
MAX_RESPONSE: Final = 10 << 20

Req = TypeVar("Req")
Resp = TypeVar("Resp")


@dataclass(frozen=True)
class RpcMethod(Generic[Req, Resp]):
    """One request/response exchange.

    Several conversations may share a protocol id: then `variant` names each in a map of one entry, which goes around
    request and response.
    """

    protocol: str
    request: Any
    """Annotated type of the request."""
    response: Any
    """Annotated type of the response."""
    variant: str | None = None
    max_request: int = MAX_REQUEST
    max_response: int = MAX_RESPONSE

    @property
    def name(self) -> str:
        """What it is called in `SENDERS`."""
        return self.variant or self.protocol

    def encode_request(self, message: Req) -> bytes:
        """Bytes of a request. Raises `EncodeError`."""
        return self._encode(self.request, message)

    def encode_response(self, message: Resp) -> bytes:
        """Bytes of a response. Raises `EncodeError`."""
        return self._encode(self.response, message)

    def decode_request(self, data: bytes) -> Req:
        """The request in `data`. Raises `DecodeError`."""
        request: Req = self._decode(self.request, data, self.max_request)
        return request

    def decode_response(self, data: bytes) -> Resp:
        """The response in `data`. Raises `DecodeError`."""
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
            raise DecodeError(f"expected {self.variant}, got {name[:60]!r}")
        return compile_shape(kind).load(payload, name, CBOR)


def split_variant(data: bytes, limit: int) -> tuple[str, object]:
    """The variant's name and undecoded payload of a message whose protocol carries several conversations.

    Raises:
        DecodeError: the message is not a map of one entry.
    """
    plain = parse_cbor(data, limit)
    if type(plain) is not dict or len(plain) != 1:
        raise DecodeError("expected a map of one entry, the name of the message")
    [(name, payload)] = plain.items()
    if type(name) is not str:
        raise DecodeError("the name of the message is not text")
    return name, payload


@dataclass(frozen=True)
class Topic(Generic[Req]):
    """A gossip topic and what is said there."""

    name: str
    message: Any
    max_bytes: int = 64 << 10
    floats: Floats = "shortest"

    def encode(self, message: Req) -> bytes:
        """Bytes of a message. Raises `EncodeError`."""
        return to_cbor(self.message, message, self.floats)

    def decode(self, data: bytes) -> Req:
        """The message in `data`. Raises `DecodeError`."""
        made: Req = from_cbor(self.message, data, self.max_bytes)
        return made


API: Final = "/hypha-api/0.0.1"
HEALTH: Final = "/hypha-health/0.0.1"
PROGRESS: Final = "/hypha-progress/0.0.1"
LEASE: Final = "/hypha-lease/0.1.0"
AGGREGATE: Final = "/hypha-aggregate/0.1.0"
PULL: Final = "/hypha-tensor-stream/pull"
PULL_WITH_HEADER: Final = "/hypha-tensor-stream/pull/0.1.0"
PUSH: Final = "/hypha-tensor-stream/push"
PUSH_WITH_HEADER: Final = "/hypha-tensor-stream/push/0.1.0"
IDENTIFY_VERSION: Final = "/hypha-identify/0.0.1"

Role = Literal["gateway", "scheduler", "worker", "data"]
"""What a node is, as its certificate may say."""

WORKER_REQUESTS_TOPIC: Final = "hypha/worker"
DATASET_RECORD: Final = "dataset record"
CIRCUIT_OFFER: Final = "/libp2p/circuit/relay/0.2.0/stop"
"""The protocol by which a relay offers a circuit to the node that it leads to."""

_SCHEDULER: Final[frozenset[Role]] = frozenset({"scheduler"})
_WORKER: Final[frozenset[Role]] = frozenset({"worker"})
_TRAINING: Final[frozenset[Role]] = _SCHEDULER | _WORKER

ALLOWED_SENDERS: Final[Mapping[str, frozenset[Role]]] = {
    # gossip, by topic
    WORKER_REQUESTS_TOPIC: _SCHEDULER,
    # requests, by variant or, where a protocol carries one conversation only, by protocol
    "WorkerOffer": _WORKER,
    "RenewLease": _SCHEDULER,
    "ReleaseLease": _SCHEDULER,
    "CancelJob": _SCHEDULER,
    "WhyNot": _SCHEDULER,
    "JobEnd": _WORKER,
    "DispatchJob": _SCHEDULER,
    "JobStatus": _WORKER,
    "ParameterPull": _TRAINING,
    "ParameterPush": _TRAINING,
    "Data": _WORKER,
    "RoundMembers": _SCHEDULER,
    "UpdateRefused": _WORKER,
    PROGRESS: _WORKER,
    # files, by protocol: slices go to workers and, to be evaluated with, to schedulers; updates to either
    PULL: _TRAINING,
    PULL_WITH_HEADER: _TRAINING,
    PUSH: _TRAINING,
    PUSH_WITH_HEADER: _TRAINING,
    # the directory, and the relay
    DATASET_RECORD: frozenset({"data"}),
    CIRCUIT_OFFER: frozenset({"gateway"}),
}
"""Whose messages are taken, by the role in the sender's certificate. What is not named here anybody may send: health,
identify, ping, look-ups, and a place at a gateway's relay. A parameter server is a worker's."""
