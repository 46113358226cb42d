"""Messages of ``/ipfs/kad/1.0.0``, with the record's publisher and ttl that py-libp2p's generated classes lack."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTOCOL: Final = "/ipfs/kad/1.0.0"


class Kind(IntEnum):
    """What a message asks for."""

    PUT_VALUE = 0
    GET_VALUE = 1
    ADD_PROVIDER = 2
    GET_PROVIDERS = 3
    FIND_NODE = 4
    PING = 5


_BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_STRING: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_UINT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
_INT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_MESSAGE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

_FIELDS: Final[dict[str, list[tuple[str, int, Any, bool, str]]]] = {
    "Record": [
        ("key", 1, _BYTES, False, ""),
        ("value", 2, _BYTES, False, ""),
        ("time_received", 5, _STRING, False, ""),
        ("publisher", 666, _BYTES, False, ""),
        ("ttl", 777, _UINT32, False, ""),
    ],
    "Peer": [
        ("id", 1, _BYTES, False, ""),
        ("addrs", 2, _BYTES, True, ""),
        ("connection", 3, _INT32, False, ""),
    ],
    "Message": [
        ("type", 1, _INT32, False, ""),
        ("cluster_level", 10, _INT32, False, ""),
        ("key", 2, _BYTES, False, ""),
        ("record", 3, _MESSAGE, False, ".hypha.kad.Record"),
        ("closer_peers", 8, _MESSAGE, True, ".hypha.kad.Peer"),
        ("provider_peers", 9, _MESSAGE, True, ".hypha.kad.Peer"),
    ],
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hypha_kad.proto", package="hypha.kad", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated, type_name in fields:
            label = 3 if repeated else 1
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hypha.kad.{name}")) for name in _FIELDS}


_CLASSES: Final = _build()
Record: Any = _CLASSES["Record"]
Peer: Any = _CLASSES["Peer"]
Message: Any = _CLASSES["Message"]
