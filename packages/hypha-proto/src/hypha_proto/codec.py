"""Strict encoding and decoding of messages: CBOR (RFC 8949) between nodes, JSON between a worker and its executor.

Decoding is stricter than the libraries used: trailing bytes, duplicate keys, tags, deep nesting, wrong types and
numbers out of range raise a `DecodeError` that names the field. Floats without a fixed width are sent as doubles.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any, Final

import cbor2
import msgspec

from hypha_proto.errors import DecodeError
from hypha_proto.texts import quote
from hypha_proto.wire_schema import CBOR, JSON, Single, compile_shape

MAX_DEPTH: Final = 32
"""Maximum nesting depth of a CBOR message."""
MAX_JSON_DEPTH: Final = 64
"""Maximum nesting depth of a JSON text."""
_TOO_DEEP: Final = f"nested more than {MAX_JSON_DEPTH} levels deep"
MAX_ITEMS: Final = 1 << 17
"""Maximum number of values and keys in a CBOR message.

Without it ten million empty maps, one byte each on the wire, would take 700 MiB in memory.
"""
_STRINGS: Final = (2, 3)
"""CBOR major types whose head gives the number of payload bytes that follow."""


def to_cbor(kind: Any, value: object) -> bytes:
    """Encode `value` as CBOR.

    Args:
        kind: annotated type of `value`.
        value: the message.

    Raises:
        EncodeError: `value` is not of type `kind`.
    """
    plain = compile_shape(kind).dump(value, "", CBOR)
    return cbor2.dumps(plain, encoders={Single: _single, float: _double})


def from_cbor(kind: Any, data: bytes, limit: int | None = None) -> Any:
    """Decode exactly one CBOR value of the annotated type `kind`.

    Raises:
        DecodeError: `data` is longer than `limit` bytes, not strict CBOR, or not of type `kind`.
    """
    plain = parse_cbor(data, limit)
    return compile_shape(kind).load(plain, "", CBOR)


def parse_cbor(data: bytes, limit: int | None = None) -> object:
    """Decode one CBOR value to plain Python objects, strictly.

    Raises:
        DecodeError: `data` is longer than `limit` bytes or not exactly one strict CBOR value.
    """
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
    """Count the items by reading only their heads; malformed input is left to the decoder to reject."""
    at, count = 0, 0
    while at < len(data):
        count += 1
        if count > MAX_ITEMS:
            raise DecodeError(f"the message has more than {MAX_ITEMS} items")
        major, info = data[at] >> 5, data[at] & 31
        argument = 1 << info - 24 if 24 <= info <= 27 else 0  # bytes of the argument that follows the initial byte
        length = int.from_bytes(data[at + 1 : at + 1 + argument], "big") if argument else info
        at += 1 + argument + (length if major in _STRINGS and info < 28 else 0)


def to_json(kind: Any, value: object) -> bytes:
    """Encode `value` as compact JSON.

    Raises:
        EncodeError: `value` is not of the annotated type `kind`.
    """
    return msgspec.json.encode(compile_shape(kind).dump(value, "", JSON))


def from_json(kind: Any, data: bytes | str, limit: int | None = None) -> Any:
    """Decode one JSON text of the annotated type `kind`.

    Raises:
        DecodeError: as `parse_json`, or `data` is not of type `kind`.
    """
    return from_plain(kind, parse_json(data, limit))


def parse_json(data: bytes | str, limit: int | None = None) -> Any:
    """Decode one JSON text to plain Python objects, strictly; for whatever comes from a socket or a file.

    Raises:
        DecodeError: `data` is longer than `limit`, not JSON, has a duplicate key, or is nested too deeply.
    """
    if limit is not None and len(data) > limit:
        raise DecodeError(f"message of {len(data)} bytes is over the limit of {limit}")
    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
        plain = _STRICT_JSON.decode(text)
    except DecodeError:
        raise
    except RecursionError:
        raise DecodeError(_TOO_DEEP) from None
    except ValueError as error:
        raise DecodeError(f"not JSON: {error}") from None
    if text.count("{") + text.count("[") > MAX_JSON_DEPTH:  # else it cannot be that deep
        check_depth(plain)
    return plain


def split_json_lines(data: bytes) -> list[bytes]:
    """Split JSON lines (https://jsonlines.org) at line feeds alone; a last line may lack its own.

    `str.splitlines` also splits at characters that JSON permits inside a string, such as U+2028 and U+0085, and
    `bytes.splitlines` at a carriage return, which JSON permits between values.
    """
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def check_depth(plain: object) -> None:
    """Check the depth of parsed JSON or TOML; recursive code may fail at a depth that the parser accepts.

    Raises:
        DecodeError: it is nested more than `MAX_JSON_DEPTH` levels deep.
    """
    level = [plain] if isinstance(plain, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        if not level:
            return
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        raise DecodeError(_TOO_DEEP)


def from_plain(kind: Any, plain: object) -> Any:
    """Convert the output of a JSON parser to a value of the annotated type `kind`.

    Raises:
        DecodeError: `plain` does not represent such a value.
    """
    return compile_shape(kind).load(plain, "", JSON)


def to_plain(kind: Any, value: object) -> Any:
    """Return `value` as the dictionaries, lists, strings and numbers of its JSON form.

    Raises:
        EncodeError: `value` is not of the annotated type `kind`.
    """
    return compile_shape(kind).dump(value, "", JSON)


_KNOWN_TAGS: Final = (0, 1, 2, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43000, 52, 54, 100, 256, 258, 260, 261, 1004, 55799)


def _refuse_tag(tag: cbor2.CBORTag, _immutable: bool) -> object:
    raise DecodeError(f"CBOR tag {tag.tag} is not allowed in a message")


def _refuse_known_tag(_value: object, _immutable: bool) -> object:
    raise DecodeError("CBOR tags are not allowed in a message")


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DecodeError(f"duplicate key {quote(twice)}")
    return made


def _refuse_constant(name: str) -> object:
    raise DecodeError(f"{name} is not a JSON number")


_STRICT_JSON: Final = json.JSONDecoder(object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)


def _single(encoder: cbor2.CBOREncoder, value: Single) -> None:
    encoder.write(struct.pack(">Bf", 0xFA, value.value))


def _double(encoder: cbor2.CBOREncoder, value: float) -> None:
    encoder.write(struct.pack(">Bd", 0xFB, value))
