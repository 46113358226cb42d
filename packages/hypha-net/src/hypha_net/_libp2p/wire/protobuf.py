"""Protobuf message classes made from tables of fields, without `protoc`.

For messages of libp2p protocols that py-libp2p lacks, or whose fields it lacks: used by `kad.messages` and
`relay.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

BYTES: Final = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
STRING: Final = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
UINT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_UINT32
UINT64: Final = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
INT32: Final = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
MESSAGE: Final = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

Field = tuple[str, int, Any, bool, str]
"""Name, number, type, whether it is repeated, and the full type name of a message field (empty for others)."""


def message_classes(package: str, syntax: str, tables: Mapping[str, Sequence[Field]]) -> dict[str, Any]:
    """Make a class for each table of fields.

    Args:
        package: such as ``hypha.kad``; a field's message type is then named ``.hypha.kad.Record``.
        syntax: ``proto2`` or ``proto3``.
    """
    name = package.replace(".", "_") + ".proto"
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax=syntax)
    for title, fields in tables.items():
        message = file.message_type.add(name=title)
        for field, number, kind, repeated, type_name in fields:
            label = 3 if repeated else 1
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        title: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{title}")) for title in tables
    }
