"""Journal records of strategies as structs: how they are written, and checked when they are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from hypha_proto.ids import PeerId
from hypha_proto.texts import quote
from hypha_scheduler.strategies.base import WriteJournal

_Record = TypeVar("_Record", bound=msgspec.Struct)


def journal_record(kind: str, record: msgspec.Struct) -> WriteJournal:
    """Return the effect that writes a record."""
    return WriteJournal(kind, msgspec.to_builtins(record, enc_hook=str))


def parse_record(record: Mapping[str, Any], kind: type[_Record]) -> _Record:
    """Return a record of the journal as a value of `kind`.

    Raises:
        ValueError: it is malformed; the field and its value are named.
    """
    try:
        return msgspec.convert(dict(record), kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ValueError(_with_value(str(error), record)) from None


@lru_cache(4096)
def _parse_peer(text: str) -> PeerId:
    return PeerId.parse(text)


def _decode(kind: type, value: object) -> PeerId:
    if kind is not PeerId or not isinstance(value, str):
        raise ValueError("Expected a peer id")
    return _parse_peer(value)


def _with_value(message: str, record: Mapping[str, Any]) -> str:
    """Return the message of an error with the value that it is about."""
    text, _, path = message.rpartition(" - at `$")
    if not text:
        return message
    value: Any = record
    for name, position in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(position)]
        except (KeyError, IndexError, TypeError):
            break
    return f"{path.removesuffix('`').lstrip('.')} is {quote(value)}: {text}"
