"""Wire representation of annotated Python types, the same for CBOR between nodes and JSON between processes.

`msgspec` structs define the fields of a message. This module maps them to the format of Rust's serde
(https://serde.rs/enum-representations.html), which msgspec does not cover: externally tagged enums, bounded integers,
and optional fields that are omitted instead of null.

A type is compiled once to a `Shape`, which converts Python values to plain objects (``dump``) and back (``load``).
Loading is strict about types, ranges and required keys; unknown keys are skipped, so that newer peers may add some.
"""

from __future__ import annotations

import math
import struct
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from hypha_proto.errors import DecodeError, EncodeError, InvalidIdError
from hypha_proto.ids import PeerId, check_digest
from hypha_proto.texts import quote


@dataclass(frozen=True, slots=True)
class IntRange:
    """Inclusive bounds of an integer."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class FloatKind:
    """Constraints on a float."""

    width: Literal[4, 8] = 8
    """Width in bytes."""
    amount: bool = False
    """Whether it must be finite and not negative."""
    largest: float = math.inf
    """Largest permitted amount."""


class Mark(Enum):
    """Annotation that selects how serde represents a field or an enum."""

    OMIT = "omitted when None"
    EXTERNAL = "externally tagged"
    DIGEST = "content digest with its algorithm"


OMIT: Final = Mark.OMIT
"""Annotation of an optional field that is omitted when None."""
EXTERNAL: Final = Mark.EXTERNAL
"""Annotation of a union that is externally tagged."""
U32 = Annotated[int, IntRange(0, 2**32 - 1)]
U64 = Annotated[int, IntRange(0, 2**64 - 1)]
I64 = Annotated[int, IntRange(-(2**63), 2**63 - 1)]
F32 = Annotated[float, FloatKind(4)]
Amount = Annotated[float, FloatKind(8, amount=True)]
"""Finite, non-negative number, such as an amount of a resource."""
MAX_PRICE: Final = 1e9
"""Largest price or bid in tokens per lease-hour."""
Price = Annotated[float, FloatKind(8, amount=True, largest=MAX_PRICE)]
"""Price or bid in tokens per lease-hour: a finite number from 0 to `MAX_PRICE`."""
Digest = Annotated[str, Mark.DIGEST]
"""Content digest such as ``blake3:<64 hex digits>``; see `hypha_proto.ids.check_digest`."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all messages. Subclasses with `tag=` are enum variants."""


class Unit(Message, frozen=True):
    """Base class of enum variants without payload; externally tagged they are a bare string."""


@dataclass(frozen=True, slots=True)
class Single:
    """Marks a float to be encoded in single precision."""

    value: float


@dataclass(frozen=True, slots=True)
class Dialect:
    """Difference between CBOR (`binary`) and JSON: UUIDs and peer ids are bytes in CBOR and text in JSON."""

    binary: bool


CBOR: Final = Dialect(binary=True)
JSON: Final = Dialect(binary=False)

Load = Callable[[object, str, Dialect], Any]
Dump = Callable[[Any, str, Dialect], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Compiled type: a pair of conversion functions. Their `path` argument locates errors in the message."""

    load: Load
    dump: Dump


def _kind(value: object) -> str:
    names = {dict: "map", list: "list", str: "text", bytes: "bytes", int: "integer", float: "float", bool: "boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _exact(kind: type, wanted: str) -> Shape:
    def load(value: object, path: str, _: Dialect) -> Any:
        if type(value) is not kind:
            raise DecodeError(f"expected {wanted}, got {_kind(value)}", path)
        return value

    def dump(value: object, path: str, _: Dialect) -> object:
        if type(value) is not kind:
            raise EncodeError(f"expected {wanted}, got {_kind(value)}", path)
        return value

    return Shape(load, dump)


def _integer(bounds: IntRange) -> Shape:
    def check(value: object, path: str, error: type[DecodeError | EncodeError]) -> int:
        if type(value) is not int:
            raise error(f"expected an integer, got {_kind(value)}", path)
        if not bounds.low <= value <= bounds.high:
            raise error(f"integer is out of range {bounds.low}..{bounds.high}", path)
        return value

    return Shape(lambda v, p, _: check(v, p, DecodeError), lambda v, p, _: check(v, p, EncodeError))


def _float(kind: FloatKind) -> Shape:
    def check(value: object, path: str, error: type[DecodeError | EncodeError]) -> float:
        if type(value) is not float:
            raise error(f"expected a float, got {_kind(value)}", path)
        if kind.amount and not (math.isfinite(value) and 0 <= value <= kind.largest):
            bounds = ">= 0" if math.isinf(kind.largest) else f"from 0 to {kind.largest:g}"
            raise error(f"expected a finite number {bounds}, got {value}", path)
        return value

    def load(value: object, path: str, dialect: Dialect) -> float:
        # JSON does not distinguish 1 and 1.0, so an integer may stand for a float there; CBOR does distinguish them
        number = float(value) if not dialect.binary and type(value) is int and abs(value) < 2**53 else value
        return check(number, path, DecodeError)

    def dump(value: object, path: str, dialect: Dialect) -> object:
        number = check(float(value) if type(value) is int else value, path, EncodeError)
        if kind.width == 8 or not dialect.binary:
            return number
        try:
            struct.pack(">f", number)
        except OverflowError:
            raise EncodeError(f"{number} does not fit in single precision", path) from None
        return Single(number)

    return Shape(load, dump)


def _identifier(
    parse_text: Callable[[str], Any], parse_raw: Callable[[bytes], Any], raw: Callable[[Any], bytes]
) -> Shape:
    def load(value: object, path: str, dialect: Dialect) -> Any:
        try:
            if dialect.binary and type(value) is bytes:
                return parse_raw(value)
            if not dialect.binary and type(value) is str:
                return parse_text(value)
        except ValueError as error:
            raise DecodeError(str(error), path) from None
        raise DecodeError(f"expected {'bytes' if dialect.binary else 'text'}, got {_kind(value)}", path)

    return Shape(load, lambda v, _p, dialect: raw(v) if dialect.binary else str(v))


def _parse_uuid(text: str) -> uuid.UUID:
    value = uuid.UUID(text)
    if str(value) != text.lower():
        raise ValueError(f"{quote(text)} is not a hyphenated uuid")
    return value


def _digest() -> Shape:
    text = _exact(str, "text")

    def load(value: object, path: str, dialect: Dialect) -> str:
        try:
            return check_digest(text.load(value, path, dialect))
        except InvalidIdError as error:
            raise DecodeError(str(error), path) from None

    return Shape(load, text.dump)


def _optional(inner: Shape) -> Shape:
    return Shape(
        lambda v, p, d: None if v is None else inner.load(v, p, d),
        lambda v, p, d: None if v is None else inner.dump(v, p, d),
    )


def _sequence(items: Callable[[int], Shape], length: int | None) -> Shape:
    def load(value: object, path: str, dialect: Dialect) -> tuple[Any, ...]:
        if type(value) is not list:
            raise DecodeError(f"expected a list, got {_kind(value)}", path)
        if length is not None and len(value) != length:
            raise DecodeError(f"expected {length} items, got {len(value)}", path)
        return tuple(items(i).load(item, f"{path}[{i}]", dialect) for i, item in enumerate(value))

    def dump(value: tuple[Any, ...], path: str, dialect: Dialect) -> object:
        if length is not None and len(value) != length:
            raise EncodeError(f"expected {length} items, got {len(value)}", path)
        return [items(i).dump(item, f"{path}[{i}]", dialect) for i, item in enumerate(value)]

    return Shape(load, dump)


def _map(inner: Shape) -> Shape:
    def load(value: object, path: str, dialect: Dialect) -> dict[str, Any]:
        if type(value) is not dict:
            raise DecodeError(f"expected a map, got {_kind(value)}", path)
        for key in value:
            if type(key) is not str:
                raise DecodeError(f"expected text keys, got {_kind(key)}", path)
        return {k: inner.load(v, f"{path}.{k}" if path else k, dialect) for k, v in value.items()}

    def dump(value: Mapping[str, Any], path: str, dialect: Dialect) -> object:
        return {k: inner.dump(v, f"{path}.{k}" if path else k, dialect) for k, v in value.items()}

    return Shape(load, dump)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: str
    shape: Shape
    omit: bool
    required: bool


def _fields(cls: type[Message]) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    made = []
    for info in msgspec.structs.fields(cls):
        hint = hints[info.name]
        omit = get_origin(hint) is Annotated and OMIT in get_args(hint)[1:]
        nullable = type(None) in _union_members(hint)
        made.append(_Field(info.name, info.encode_name, compile_shape(hint), omit, info.required and not nullable))
    return tuple(made)


def _struct(cls: type[Message], tag: tuple[str, str] | None) -> Shape:
    """Compile a struct to a map of its fields, preceded by its tag if it is an internally tagged variant."""
    fields = _fields(cls)
    # computed once: asking msgspec for the fields evaluates annotations, which is too slow for every message
    unset = {info.name: None for info in msgspec.structs.fields(cls) if info.required}

    def load(value: object, path: str, dialect: Dialect) -> Any:
        if type(value) is not dict:
            raise DecodeError(f"expected a map, got {_kind(value)}", path)
        found = {}
        for entry in fields:
            where = f"{path}.{entry.key}" if path else entry.key
            if entry.key in value:
                found[entry.name] = entry.shape.load(value[entry.key], where, dialect)
            elif entry.required:
                raise DecodeError("is missing", where)
        try:
            return cls(**{**unset, **found})
        except ValueError as error:  # raised by the struct's __post_init__
            raise DecodeError(str(error), path) from None

    def dump(value: Any, path: str, dialect: Dialect) -> object:
        if type(value) is not cls:
            raise EncodeError(f"expected {cls.__name__}, got {type(value).__name__}", path)
        plain: dict[str, object] = {tag[0]: tag[1]} if tag else {}
        for entry in fields:
            item = getattr(value, entry.name)
            if item is not None or not entry.omit:
                where = f"{path}.{entry.key}" if path else entry.key
                plain[entry.key] = entry.shape.dump(item, where, dialect)
        return plain

    return Shape(load, dump)


def _tag(cls: type[Message]) -> str:
    tag = cls.__struct_config__.tag
    if not isinstance(tag, str):
        raise TypeError(f"{cls.__name__} is a variant of an enum and needs a tag")
    return tag


def _internal(variants: tuple[type[Message], ...]) -> Shape:
    """Compile an internally tagged enum: the field `tag_field` of the map names the variant."""
    key = variants[0].__struct_config__.tag_field or "type"
    shapes = {_tag(cls): _struct(cls, (key, _tag(cls))) for cls in variants}
    by_class = {cls: shapes[_tag(cls)] for cls in variants}

    def load(value: object, path: str, dialect: Dialect) -> Any:
        if type(value) is not dict:
            raise DecodeError(f"expected a map, got {_kind(value)}", path)
        where = f"{path}.{key}" if path else key
        if key not in value:
            raise DecodeError("is missing", where)
        name = value[key]
        if type(name) is not str or name not in shapes:
            raise DecodeError(f"expected one of {', '.join(shapes)}, got {quote(name)}", where)
        return shapes[name].load(value, path, dialect)

    def dump(value: Any, path: str, dialect: Dialect) -> object:
        shape = by_class.get(type(value))
        if shape is None:
            names = ", ".join(cls.__name__ for cls in by_class)
            raise EncodeError(f"expected one of {names}, got {type(value).__name__}", path)
        return shape.dump(value, path, dialect)

    return Shape(load, dump)


def _external(variants: tuple[type[Message], ...]) -> Shape:
    """Compile an externally tagged enum: a string for a unit variant, otherwise a map {variant name: payload}."""
    units = {_tag(cls): cls for cls in variants if issubclass(cls, Unit)}
    payloads = {_tag(cls): _payload(cls) for cls in variants if not issubclass(cls, Unit)}
    names = ", ".join((*payloads, *units))

    def load(value: object, path: str, dialect: Dialect) -> Any:
        if type(value) is str and value in units:
            return units[value]()
        if type(value) is dict and len(value) == 1:
            [(name, payload)] = value.items()
            if name in payloads:
                return payloads[name].load(payload, f"{path}.{name}" if path else name, dialect)
            raise DecodeError(f"expected one of {names}, got {quote(name)}", path)
        shown = quote(value) if isinstance(value, str) else _kind(value)
        raise DecodeError(f"expected one of {names}, got {shown}", path)

    def dump(value: Any, path: str, dialect: Dialect) -> object:
        name = _tag(type(value))
        if name in units:
            return name
        if name not in payloads:
            raise EncodeError(f"expected one of {names}, got {type(value).__name__}", path)
        return {name: payloads[name].dump(value, f"{path}.{name}" if path else name, dialect)}

    return Shape(load, dump)


class Newtype(Message, frozen=True):
    """Base class of enum variants with a single field, whose value is the payload itself instead of a map."""


def _payload(cls: type[Message]) -> Shape:
    if not issubclass(cls, Newtype):
        return _struct(cls, None)
    [entry] = _fields(cls)
    return Shape(
        lambda v, p, d: cls(**{entry.name: entry.shape.load(v, p, d)}),
        lambda v, p, d: entry.shape.dump(getattr(v, entry.name), p, d),
    )


def _union_members(hint: Any) -> tuple[Any, ...]:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


_SCALARS: Final[dict[Any, Shape]] = {
    bool: _exact(bool, "a boolean"),
    str: _exact(str, "text"),
    int: _integer(IntRange(-(2**63), 2**64 - 1)),
    float: _float(FloatKind()),
    uuid.UUID: _identifier(_parse_uuid, lambda raw: uuid.UUID(bytes=raw), lambda v: v.bytes),
    PeerId: _identifier(PeerId.parse, PeerId, lambda v: v.raw),
}


def _annotated(hint: Any) -> Shape:
    inner, *marks = get_args(hint)
    for mark in marks:
        if isinstance(mark, IntRange):
            return _integer(mark)
        if isinstance(mark, FloatKind):
            return _float(mark)
        if mark is Mark.DIGEST:
            return _digest()
        if mark is EXTERNAL:
            members = tuple(m for m in _union_members(inner) if m is not type(None))
            shape = _external(members)
            return _optional(shape) if len(members) < len(_union_members(inner)) else shape
    return compile_shape(inner)


def _union(hint: Any) -> Shape:
    members = tuple(m for m in _union_members(hint) if m is not type(None))
    shape = compile_shape(members[0]) if len(members) == 1 else _internal(members)
    return _optional(shape) if len(members) < len(_union_members(hint)) else shape


@lru_cache(maxsize=512)
def compile_shape(hint: Any) -> Shape:
    """Compile an annotated type to its wire representation.

    Raises:
        TypeError: messages cannot hold this type.
    """
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin = get_origin(hint)
    if origin is Annotated:
        return _annotated(hint)
    if origin in (Union, types.UnionType):
        return _union(hint)
    if origin is tuple:
        args = get_args(hint)
        if args[-1] is Ellipsis:
            item = compile_shape(args[0])
            return _sequence(lambda _: item, None)
        shapes = [compile_shape(arg) for arg in args]
        return _sequence(lambda i: shapes[i], len(shapes))
    if origin is dict:
        return _map(compile_shape(get_args(hint)[1]))
    if isinstance(hint, type) and issubclass(hint, Message):
        tagged = hint.__struct_config__.tag is not None and hint.__struct_config__.tag_field is not None
        return _internal((hint,)) if tagged and not issubclass(hint, Newtype) else _struct(hint, None)
    raise TypeError(f"messages cannot hold the type {hint!r}")
