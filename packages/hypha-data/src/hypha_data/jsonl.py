"""Reader of JSONL files (https://jsonlines.org): one JSON object a line, in UTF-8. The objects are the rows.

Every row is checked here, so that no worker gets one that it cannot read.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from hypha_data.digest_cache import Fingerprint, OnRead
from hypha_data.errors import DatasetError
from hypha_proto.codec import MAX_JSON_DEPTH, check_depth
from hypha_proto.errors import DecodeError
from hypha_proto.texts import quote

MAX_LINE: Final = 1 << 20
"""Largest length of a line in bytes, without its end."""
MAX_COLUMNS: Final = 1024
"""Largest number of columns of a dataset."""
MAX_COLUMN_NAME: Final = 256
"""Largest length of a column's name in characters."""
_PROGRESS_BYTES: Final = 4 << 20
_KINDS: Final[Mapping[type, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "list",
    type(None): "null",
}
_NUMBERS: Final = frozenset({"integer", "number"})
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_REMEDY: Final = 'write one object a line, such as {"text": "…"}'


class RowFormatError(ValueError):
    """A row cannot be used; the message has fault, value and remedy."""


@dataclass(slots=True)
class Column:
    """Column of the rows that were read so far."""

    kind: str
    """As in `hypha_proto.datasets.Manifest.columns`."""
    place: str
    """File and line of the first value of this kind."""
    values: int = 0
    """Number of rows with a value other than null."""
    first_gap: str = ""
    """File and line of the first row without a value; empty if there is none."""


class ColumnTable:
    """Columns of the rows of a dataset: the names that occur, each with values of one kind."""

    def __init__(self) -> None:
        """Start without rows."""
        self.columns: dict[str, Column] = {}
        self.rows = 0
        self._first_place = ""

    @property
    def kinds(self) -> dict[str, str]:
        """Kind of each column by name, in the order in which the names first occur."""
        return {name: column.kind for name, column in self.columns.items()}

    def add(self, path: Path, line: int, row: Mapping[str, object]) -> None:
        """Add the row in a line of a file.

        Raises:
            RowError: a value is of another kind than those before, or there are too many columns; with the remedy.
        """
        place = f"{path.name}, line {line}"
        for name, value in row.items():
            self._add_value(place, name, value)
        if len(row) < len(self.columns):
            for name in self.columns.keys() - row.keys():
                self._add_gap(self.columns[name], place)
        self.rows += 1
        self._first_place = self._first_place or place

    def _add_value(self, place: str, name: str, value: object) -> None:
        kind = _KINDS[type(value)]
        column = self.columns.get(name)
        if column is None:
            self._check_name(name)
            column = self.columns[name] = Column(kind, place, first_gap=self._first_place)
        if value is None:
            self._add_gap(column, place)
            return
        column.values += 1
        if column.kind == kind or (kind == "integer" and column.kind == "number"):
            return
        if column.kind != "null" and {column.kind, kind} != _NUMBERS:
            raise RowFormatError(
                f"column {quote(name)} is of kind {kind} here ({quote(value)}) and of kind {column.kind} in "
                f"{column.place}; give it values of one kind"
            )
        column.kind, column.place = kind, place

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= MAX_COLUMN_NAME:
            raise RowFormatError(
                f"the key {quote(name)} has {len(name)} characters; a column's name has 1 to {MAX_COLUMN_NAME}"
            )
        if len(self.columns) == MAX_COLUMNS:
            raise RowFormatError(
                f"the key {quote(name)} is column {MAX_COLUMNS + 1}, and a dataset has at most {MAX_COLUMNS}; put "
                "keys that vary into an object, which is one column"
            )

    def _add_gap(self, column: Column, place: str) -> None:
        column.first_gap = column.first_gap or place

    def describe_gaps(self, limit: int = 20) -> Iterator[str]:
        """Yield one line for each column, at most `limit`, that some rows lack or have as null."""
        gaps = [(name, column) for name, column in self.columns.items() if column.values < self.rows]
        for name, column in gaps[:limit]:
            missing = f"{self.rows - column.values} of {self.rows} rows"
            yield f"column {quote(name)} has no value in {missing}; the first is in {column.first_gap}"
        if len(gaps) > limit:
            yield f"{len(gaps) - limit} further columns have no value in some rows"


class RowFile:
    """A JSONL file whose rows are all valid, open for reading rows in any order. A context manager that closes it.

    Memory holds 8 bytes a row and one line.

    Attributes:
        path: path of the file.
    """

    def __init__(self, path: Path, columns: ColumnTable, on_read: OnRead, unpacked: Path | None = None) -> None:
        """Read and check the whole file.

        Args:
            path: a regular file.
            columns: gets all rows.
            on_read: called now and then with the number of bytes read since.
            unpacked: file with the content of `path`, if that is compressed.

        Raises:
            DatasetError: a row is not valid, or there is none; the message names the line and the remedy.
            OSError: the file cannot be read.
        """
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise DatasetError(f"{path}: not a regular file; write the rows to a file first")
        self.path = path
        self._file = (unpacked or path).open("rb")
        try:
            self._fingerprint = Fingerprint.of(os.fstat(self._file.fileno()))
            self._ends = array("Q", [0])
            for end in _check_lines(path, self._file, columns, on_read):
                self._ends.append(end)
            if not len(self):
                raise DatasetError(f"{path}: holds no rows; write one JSON object a line")
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ends) - 1

    @property
    def size(self) -> int:
        """Size of the rows in bytes."""
        return self._ends[-1]

    def row(self, index: int) -> bytes:
        """Return the text of row `index`, without the end of the line.

        Raises:
            OSError: the file cannot be read.
        """
        start, end = self._ends[index], self._ends[index + 1]
        return os.pread(self._file.fileno(), end - start, start).strip()

    def check_unchanged(self) -> None:
        """Check that the rows were not rewritten after they were checked.

        Raises:
            DatasetError: the file was written to.
        """
        if Fingerprint.of(os.fstat(self._file.fileno())) != self._fingerprint:
            raise DatasetError(f"{self.path}: changed while it was read; run the command again when it is complete")

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _check_lines(path: Path, file: BinaryIO, columns: ColumnTable, on_read: OnRead) -> Iterator[int]:
    """Check the rows of a file and add them to `columns`; yield the offset of each line's end."""
    number, offset, reported = 0, 0, 0
    while line := file.readline(MAX_LINE + 2):
        number += 1
        try:
            columns.add(path, number, parse_row(line))
        except RowFormatError as error:
            raise DatasetError(f"{path}, line {number}: {error}") from None
        offset += len(line)
        if offset - reported >= _PROGRESS_BYTES:
            on_read(offset - reported)
            reported = offset
        yield offset
    on_read(offset - reported)


def parse_row(line: bytes) -> dict[str, Any]:
    """Parse one line of a JSONL file.

    Raises:
        RowError: it is not a JSON object that fits into a dataset.
    """
    text = line.strip()
    if len(line) > MAX_LINE and len(line.rstrip(b"\r\n")) > MAX_LINE:
        start = quote(line.decode(errors="replace"))
        raise RowFormatError(f"longer than {MAX_LINE} bytes: {start}; divide the row, or refer to large content by URI")
    if not text:
        raise RowFormatError("is empty; remove it")
    if line.startswith(b"\xef\xbb\xbf"):
        raise RowFormatError("begins with a byte order mark; save the file as UTF-8 without one")
    row = _decode(line.rstrip())
    if not isinstance(row, dict):
        raise RowFormatError(f"is of kind {_KINDS[type(row)]} ({quote(row)}), and a row is an object; {_REMEDY}")
    if b"\r" in text:
        raise RowFormatError("has a carriage return within the row, where some programs end a line; remove it")
    if _SURROGATE.search(text):
        _check_surrogates(row)
    return row


def _decode(text: bytes) -> Any:
    try:
        plain = _decode_whole(text.decode())
        if text.count(b"{") + text.count(b"[") > MAX_JSON_DEPTH:
            check_depth(plain)
    except RowFormatError:
        raise
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 20) : error.pos + 20]
        raise RowFormatError(f"not JSON at column {error.colno} ({error.msg}), near {quote(near)}; {_REMEDY}") from None
    except UnicodeDecodeError as error:
        bad = f"byte 0x{error.object[error.start]:02x} at {error.start + 1}"
        raise RowFormatError(f"not UTF-8: {bad}; save the file as UTF-8") from None
    except DecodeError as error:
        raise RowFormatError(f"{error}; make it flatter") from None
    except RecursionError:
        raise RowFormatError("nested too deeply; make it flatter") from None
    except ValueError:  # sys.set_int_max_str_digits
        raise RowFormatError("an integer of thousands of digits; write it as text") from None
    return plain


def _decode_whole(text: str) -> Any:
    try:
        plain, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError:
        end = -1
    return plain if end == len(text) else _DECODER.decode(text)  # which skips white space first, or tells the fault


def _check_surrogates(row: dict[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise RowFormatError(f"{half} is half of a surrogate pair; write the whole character") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RowFormatError(f"the key {quote(key)} occurs twice; remove one of them")
        seen.add(key)
    return made


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise RowFormatError(f"{quote(number)} is beyond the range of a number; write a smaller one, or text")
    return value


def _refuse_constant(name: str) -> float:
    raise RowFormatError(f"{name} is not a JSON number; write null, or leave the key out")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
