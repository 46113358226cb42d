"""Check of a part: the rows of one slice as an executor sends them, one JSON object a line. Blocking.

What a worker sends is not trusted: each line is strict JSON, and its rows are those of the slice, once each, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hypha_net.redaction import redact_urls
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_proto.texts import quote, shorten
from hypha_scheduler.strategies.inference.config import CLASSIFY, GENERATE

MAX_LINE: Final = 4 << 20
"""Bytes of one row."""
MAX_PART: Final = 8 << 30
"""Bytes of one part."""
_MAX_KIND: Final = 80
_MAX_EXAMPLE: Final = 400
_MAX_KINDS: Final = 16
_OTHERS: Final = "others"
"""Stands for the kinds of errors that a part has beyond `_MAX_KINDS`."""


class InvalidPartError(Exception):
    """A part is not what was asked for; the message says where and why."""


class ErrorKind(msgspec.Struct, frozen=True, array_like=True):
    """Rows that could not be computed for the same kind of reason."""

    rows: int
    example: str
    """What the first of them says."""

    def with_rows(self, rows: int) -> ErrorKind:
        """Return the kind with more rows."""
        return ErrorKind(self.rows + rows, self.example)


class PartCounts(msgspec.Struct, frozen=True):
    """What a valid part contains."""

    rows: int
    errors: int
    """Rows that could not be computed."""
    tokens: int
    """Tokens that were generated."""
    size: int
    """Size in bytes."""
    error_kinds: Mapping[str, ErrorKind]
    """The errors by their kind."""


def largest_part(rows: int) -> int:
    """Return the size limit in bytes of a part with this many rows."""
    return min(rows * MAX_LINE, MAX_PART)


def check_part(path: Path, index: int, rows: int, task: str) -> PartCounts:
    """Check the part of a slice with `rows` rows, computed for `task`.

    Raises:
        InvalidPartError: it is not what was asked for.
        OSError: it cannot be read.
    """
    count = tokens = size = 0
    kinds: dict[str, ErrorKind] = {}
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            place = f"line {count + 1}"
            if len(line) > MAX_LINE:
                raise InvalidPartError(f"{place} is longer than {MAX_LINE} bytes")
            if not line.endswith(b"\n"):
                raise InvalidPartError(f"{place} is cut short: it does not end with a line feed")
            if count == rows:
                raise InvalidPartError(f"{place} is one too many: slice {index} has {rows} rows")
            row = _parse(line, place)
            _check_position(row, index, count, place)
            if "error" in row:
                _count_error(kinds, row["error"], place)
            else:
                tokens += _check_result(row, task, place)
            count, size = count + 1, size + len(line)
    if count != rows:
        raise InvalidPartError(f"it has {count} rows, and slice {index} has {rows}")
    return PartCounts(count, sum(kind.rows for kind in kinds.values()), tokens, size, kinds)


def _parse(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        row = parse_json(line.decode())  # UTF-8 only: of bytes the parser would guess the encoding
    except DecodeError as error:
        raise InvalidPartError(f"{place}: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidPartError(f"{place}: not UTF-8: {error}") from None
    if not isinstance(row, dict):
        raise InvalidPartError(f"{place} is no object")
    return row


def _check_position(row: Mapping[str, Any], index: int, number: int, place: str) -> None:
    for key, expected in (("slice", index), ("row", number)):
        found = row.get(key)
        if type(found) is not int or found != expected:
            raise InvalidPartError(f"{place}: {key} is {quote(found)}, expected {expected}")


def _count_error(kinds: dict[str, ErrorKind], error: Any, place: str) -> None:
    if not isinstance(error, dict) or not all(isinstance(error.get(key), str) for key in ("kind", "detail")):
        raise InvalidPartError(f"{place}: error is {quote(error)}, expected an object with kind and detail")
    name = shorten(error["kind"], _MAX_KIND)
    if name not in kinds and len(kinds) >= _MAX_KINDS:
        name = _OTHERS
    if name in kinds:
        kinds[name] = kinds[name].with_rows(1)
    else:
        kinds[name] = ErrorKind(1, shorten(redact_urls(error["detail"]), _MAX_EXAMPLE))


def _check_result(row: Mapping[str, Any], task: str, place: str) -> int:
    """Return how many tokens were generated for the row."""
    for key, (is_valid, what) in _RESULTS[task].items():
        if not is_valid(found := row.get(key)):
            raise InvalidPartError(f"{place}: {key} is {quote(found)}, expected {what}")
    return row["tokens"] if task == GENERATE else 0


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


_RESULTS: Final[Mapping[str, Mapping[str, tuple[Callable[[object], bool], str]]]] = {
    CLASSIFY: {"label": (_is_count, "an integer"), "score": (_is_number, "a number")},
    GENERATE: {
        "text": (lambda value: isinstance(value, str), "text"),
        "tokens": (_is_count, "an integer"),
        "finish": (lambda value: value in ("stop", "length"), '"stop" or "length"'),
    },
}
"""Keys that a computed row of each task has."""
