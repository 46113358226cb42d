"""Messages of ``/ipfs/kad/1.0.0`` (https://github.com/libp2p/specs/blob/master/kad-dht/README.md#rpc-messages).

Built here because py-libp2p's generated classes lack the record's `publisher` and `ttl`, fields that rust-libp2p adds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from hypha_net._libp2p.wire.protobuf import BYTES, INT32, MESSAGE, STRING, UINT32, Field, message_classes

PROTOCOL: Final = "/ipfs/kad/1.0.0"


class Kind(IntEnum):
    """Types of requests and their answers."""

    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


_FIELDS: Final[dict[str, list[Field]]] = {
    "Record": [
        ("key", 1, BYTES, False, ""),
        ("value", 2, BYTES, False, ""),
        ("time_received", 5, STRING, False, ""),
        ("publisher", 666, BYTES, False, ""),
        ("ttl", 777, UINT32, False, ""),
    ],
    "Peer": [
        ("id", 1, BYTES, False, ""),
        ("addrs", 2, BYTES, True, ""),
        ("connection", 3, INT32, False, ""),
    ],
    "Message": [
        ("type", 1, INT32, False, ""),
        ("cluster_level", 10, INT32, False, ""),
        ("key", 2, BYTES, False, ""),
        ("record", 3, MESSAGE, False, ".hypha.kad.Record"),
        ("closer_peers", 8, MESSAGE, True, ".hypha.kad.Peer"),
        ("provider_peers", 9, MESSAGE, True, ".hypha.kad.Peer"),
    ],
}


_CLASSES: Final = message_classes("hypha.kad", "proto3", _FIELDS)
Record: Any = _CLASSES["Record"]
Peer: Any = _CLASSES["Peer"]
Message: Any = _CLASSES["Message"]
