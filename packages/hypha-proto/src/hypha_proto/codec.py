"""Messages to bytes and back: CBOR between nodes, JSON between a worker and its executor.

Reading is strict where libraries are not: trailing bytes, duplicate keys, tags, deep nesting, wrong types and numbers
out of range are a `DecodeError` that says where. Writing follows what Rust nodes write, to the byte.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any, Final, Literal

import cbor2
import msgspec

from hypha_proto.errors import DecodeError
from hypha_proto.wire_schema import CBOR, JSON, Single, compile_shape

Floats = Literal["double", "shortest"]
"""How floats of no fixed width are written: requests use double, gossip the shortest that keeps the value."""

MAX_DEPTH: Final = 32
MAX_ITEMS: Final = 1 << 17
"""Values and keys in one CBOR message: ten million empty maps, a byte each on the wire, would be 700 MiB in memory."""
_STRINGS: Final = (2, 3)
"""Major types of CBOR whose head is followed by as many bytes as it says."""


def to_cbor(kind: Any, value: object, floats: Floats = "double") -> bytes:
    """Encode `value`, of the annotated type `kind`.

    Raises:
        EncodeError: the value is not of that type.
    """
    plain = compile_shape(kind).dump(value, "", CBOR)
    return cbor2.dumps(plain, encoders={Single: _single, float: _shortest if floats == "shortest" else _double})


def from_cbor(kind: Any, data: bytes, limit: int | None = None) -> Any:
    """Decode exactly one CBOR value of the annotated type `kind`.

    Raises:
        DecodeError: it is longer than `limit` bytes, not strict CBOR, or not of that type.
    """
    plain = parse_cbor(data, limit)
    return compile_shape(kind).load(plain, "", CBOR)


def parse_cbor(data: bytes, limit: int | None = None) -> object:
    """Decode one CBOR value to plain Python, strictly. Raises `DecodeError`."""
    if limit is not None and len(data) > limit:
        raise DecodeError(f"message of {len(data)} bytes is over the limit of {limit}")
    if len(data) > MAX_ITEMS:
        _check_items(data)
    stream = io.BytesIO(data)
    decoder = cbor2.CBORDecoder(
        stream,
        tag_hook=_refuse_tag,
        semantic_decoders=dict.fromkeys(_KNOWN_TAGS, _refuse_known_tag),
        max_depth=MAX_DEPTH,
        allow_duplicate_keys=False,
        strict_hashable_types=True,
        read_size=1,
    )
    try:
        plain: object = decoder.decode()
    except DecodeError:
        raise
    except (cbor2.CBORError, ValueError, OverflowError, RecursionError, MemoryError, TypeError) as error:
        cause = error.__cause__
        if isinstance(cause, DecodeError):
            raise cause from None
        raise DecodeError(f"not strict CBOR: {error}") from None
    rest = len(data) - stream.tell()
    if rest:
        raise DecodeError(f"{rest} bytes follow the message")
    return plain


def _check_items(data: bytes) -> None:
    """Count the items of a message by their heads alone; what is not well formed is the decoder's to refuse."""
    at, count = 0, 0
    while at < len(data):
        count += 1
        if count > MAX_ITEMS:
            raise DecodeError(f"a message of more than {MAX_ITEMS} items")
        major, info = data[at] >> 5, data[at] & 31
        behind = 1 << info - 24 if 24 <= info <= 27 else 0
        length = int.from_bytes(data[at + 1 : at + 1 + behind], "big") if behind else info
        at += 1 + behind + (length if major in _STRINGS and info < 28 else 0)


def to_json(kind: Any, value: object) -> bytes:
    """Encode `value`, of the annotated type `kind`, as compact JSON. Raises `EncodeError`."""
    return msgspec.json.encode(compile_shape(kind).dump(value, "", JSON))


def from_json(kind: Any, data: bytes | str, limit: int | None = None) -> Any:
    """Decode one JSON text of the annotated type `kind`.

    Raises:
        DecodeError: it is longer than `limit`, not JSON, has a duplicate key, or is not of that type.
    """
    if limit is not None and len(data) > limit:
        raise DecodeError(f"message of {len(data)} bytes is over the limit of {limit}")
    try:
        plain = json.loads(data, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except DecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from None
    return from_plain(kind, plain)


def from_plain(kind: Any, plain: object) -> Any:
    """Take what a JSON parser returned as a value of the annotated type `kind`. Raises `DecodeError`."""
    return compile_shape(kind).load(plain, "", JSON)


def to_plain(kind: Any, value: object) -> Any:
    """The value as dictionaries, lists, text and numbers, as it stands in JSON. Raises `EncodeError`."""
    return compile_shape(kind).dump(value, "", JSON)


_KNOWN_TAGS: Final = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43000, 52, 54, 100, 256, 258, 260, 261, 1004, 55799)


def _refuse_tag(tag: cbor2.CBORTag, _immutable: bool) -> object:
    raise DecodeError(f"CBOR tag {tag.tag} has no place in a message")


def _refuse_known_tag(_value: object, _immutable: bool) -> object:
    raise DecodeError("a CBOR tag has no place in a message")


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DecodeError(f"the key {twice[:60]!r} stands twice in one object")
    return made


def _refuse_constant(name: str) -> object:
    raise DecodeError(f"{name} is not a number of JSON")


def _single(encoder: cbor2.CBOREncoder, value: Single) -> None:
    encoder.write(struct.pack(">Bf", 0xFA, value.value))


def _double(encoder: cbor2.CBOREncoder, value: float) -> None:
    encoder.write(struct.pack(">Bd", 0xFB, value))


def _shortest(encoder: cbor2.CBOREncoder, value: float) -> None:
    for lead, form in ((0xF9, ">Be"), (0xFA, ">Bf")):
        try:
            packed = struct.pack(form, lead, value)
        except OverflowError:
            continue
        if struct.unpack(form, packed)[1] == value:
            encoder.write(packed)
            return
    _double(encoder, value)
