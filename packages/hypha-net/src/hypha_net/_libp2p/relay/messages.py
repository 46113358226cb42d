"""Messages of circuit relay v2 (https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md).

The classes are built here with explicit field presence, so that a type of 0 is encoded: some peers require it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from hypha_net._libp2p.wire.protobuf import BYTES, INT32, MESSAGE, UINT32, UINT64, Field, message_classes
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE: Final = 64 << 10
MESSAGE_TIMEOUT: Final = 10.0
"""Seconds within which the other side must have sent its message."""


class HopKind(IntEnum):
    """Types of messages between a client and a relay (hop protocol)."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """Types of messages between a relay and the circuit's target (stop protocol)."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """Status codes of answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def status_name(number: int) -> str:
    """Format a status code for logs, such as ``NO_RESERVATION (204)``."""
    known = number in Status._value2member_map_
    return f"{Status(number).name} ({number})" if known else f"status {number}"


_PEER: Final = ".hypha.relay.Peer"
_LIMIT: Final = ".hypha.relay.Limit"

_FIELDS: Final[dict[str, list[Field]]] = {
    "Peer": [("id", 1, BYTES, False, ""), ("addrs", 2, BYTES, True, "")],
    "Reservation": [
        ("expire", 1, UINT64, False, ""),
        ("addrs", 2, BYTES, True, ""),
        ("voucher", 3, BYTES, False, ""),
        # extension of Hypha: seconds from receipt, because `expire` is a time of the relay's clock
        ("lifetime", 1000, UINT32, False, ""),
    ],
    "Limit": [("duration", 1, UINT32, False, ""), ("data", 2, UINT64, False, "")],
    "HopMessage": [
        ("type", 1, INT32, False, ""),
        ("peer", 2, MESSAGE, False, _PEER),
        ("reservation", 3, MESSAGE, False, ".hypha.relay.Reservation"),
        ("limit", 4, MESSAGE, False, _LIMIT),
        ("status", 5, INT32, False, ""),
    ],
    "StopMessage": [
        ("type", 1, INT32, False, ""),
        ("peer", 2, MESSAGE, False, _PEER),
        ("limit", 3, MESSAGE, False, _LIMIT),
        ("status", 4, INT32, False, ""),
    ],
}


_CLASSES: Final = message_classes("hypha.relay", "proto2", _FIELDS)
HopMessage: Any = _CLASSES["HopMessage"]
StopMessage: Any = _CLASSES["StopMessage"]


def parse_peer_id(raw: bytes) -> PeerId | None:
    """Return the peer id in a message's field, or None if it is invalid."""
    try:
        return PeerId(bytes(raw))
    except InvalidIdError:
        return None
