"""Messages of circuit relay v2 (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).

Built here with presence of every field, so that a type of 0 is written out: some peers miss it otherwise.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE: Final = 64 << 10


class HopKind(IntEnum):
    """Types of a message to or from a relay."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """Types of a message between a relay and the circuit's target."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """Answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def status_name(number: int) -> str:
    """A status for people: ``NO_RESERVATION (204)``."""
    known = number in Status._value2member_map_
    return f"{Status(number).name} ({number})" if known else f"status {number}"


_BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_INT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_UINT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
_UINT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
_MESSAGE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_PEER: Final = ".hypha.relay.Peer"
_LIMIT: Final = ".hypha.relay.Limit"

_FIELDS: Final[dict[str, list[tuple[str, int, Any, bool, str]]]] = {
    "Peer": [("id", 1, _BYTES, False, ""), ("addrs", 2, _BYTES, True, "")],
    "Reservation": [
        ("expire", 1, _UINT64, False, ""),
        ("addrs", 2, _BYTES, True, ""),
        ("voucher", 3, _BYTES, False, ""),
    ],
    "Limit": [("duration", 1, _UINT32, False, ""), ("data", 2, _UINT64, False, "")],
    "HopMessage": [
        ("type", 1, _INT32, False, ""),
        ("peer", 2, _MESSAGE, False, _PEER),
        ("reservation", 3, _MESSAGE, False, ".hypha.relay.Reservation"),
        ("limit", 4, _MESSAGE, False, _LIMIT),
        ("status", 5, _INT32, False, ""),
    ],
    "StopMessage": [
        ("type", 1, _INT32, False, ""),
        ("peer", 2, _MESSAGE, False, _PEER),
        ("limit", 3, _MESSAGE, False, _LIMIT),
        ("status", 4, _INT32, False, ""),
    ],
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hypha_relay.proto", package="hypha.relay", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated, type_name in fields:
            label = 3 if repeated else 1
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hypha.relay.{name}")) for name in _FIELDS
    }


_CLASSES: Final = _build()
HopMessage: Any = _CLASSES["HopMessage"]
StopMessage: Any = _CLASSES["StopMessage"]
