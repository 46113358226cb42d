"""Tables: rows with named columns, which become tensors. The sources of rows are csv, jsonl, parquet and hf.

A first pass finds the kind of each column, the longest text and the classes, a second one converts. Rows of both have
the same order; memory holds one block of rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hypha_data.errors import DatasetError
from hypha_data.sources import arrow_columns
from hypha_data.sources.options import ReadOptions
from hypha_data.sources.reader import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    LABELS,
    MAX_CLASSES,
    MAX_TEXT,
    Arrays,
    Layout,
    OnProgress,
    SampleLayout,
    files_state,
)
from hypha_data.sources.tokenizer import Tokenizer
from hypha_proto.safetensors_io import STORED_DTYPES
from hypha_proto.texts import quote, shorten

TEXT: Final = "text"
"""Kind of a column, and name of the tensor of the column `--text`."""
_INTEGER: Final = re.compile(r"[+-]?(?:0|[1-9]\d{0,18})", re.ASCII)
_NUMBER: Final = re.compile(
    r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE
)
_NO_NAMES: Final = frozenset({"", "nan", "null", "none", "n/a", "na"})
_FLOAT_LIMIT: Final = float(np.finfo(np.float32).max)
_TENSORS: Final = {"integer": "I64", "number": "F32", "boolean": "U8"}


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of a table."""

    columns: Mapping[str, Any]
    """Values of each column, a sequence or an Arrow array; None where a row has none."""
    path: Path
    numbers: Sequence[int]
    """Number of each row in the file, or of its line."""
    unit: str = "line"
    """What is numbered."""

    def place(self, row: int) -> str:
        """Return file and row of a row of the block, by its number in the block."""
        return f"{self.path}, {self.unit} {self.numbers[row]}"


class RowSource(Protocol):
    """Rows of a table."""

    paths: Sequence[Path]
    """Files of the table: first those with rows, then those that describe it."""
    is_typed: bool
    """Whether values have types; otherwise they are text, and numbers if all values of a column are."""
    is_listed: bool
    """Whether the names of the columns are known before the rows are read."""

    def names(self) -> Sequence[str]:
        """Return the names of the columns."""
        ...

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows with the values of some columns."""
        ...


class JoinedRows:
    """Rows of several files with the same columns, one file after the other; a `RowSource`."""

    def __init__(self, parts: Sequence[RowSource], descriptions: Sequence[Path] = ()) -> None:
        """Join the rows of files.

        Args:
            parts: the files, all of one format.
            descriptions: files that describe them.

        Raises:
            DatasetError: one has other columns than the first one.
        """
        self._parts = parts
        self.paths: Sequence[Path] = (*(path for part in parts for path in part.paths), *descriptions)
        self.is_typed, self.is_listed = parts[0].is_typed, parts[0].is_listed
        first = parts[0].names()
        for path, part in zip(self.paths, parts, strict=False):
            if different := {*first} ^ {*part.names()}:
                name = min(different)
                having, lacking = (self.paths[0], path) if name in first else (path, self.paths[0])
                raise DatasetError(
                    f"{lacking}: has no column {quote(name)}, and {having} has one; give all files the same columns, "
                    "or prepare them one by one"
                )

    def names(self) -> Sequence[str]:
        """Return the names of the columns, as in the first file."""
        return self._parts[0].names()

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield the rows of all files."""
        for part in self._parts:
            yield from part.blocks(columns)


class TableReader:
    """Reader of a table; a `hypha_data.sources.reader.SampleReader`."""

    def __init__(
        self, source: RowSource, options: ReadOptions, classes: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Select the columns.

        Args:
            source: the rows.
            options: which columns become what.
            classes: names of the classes by column, if the source has them.

        Raises:
            DatasetError: a column does not exist, or names of tensors clash.
        """
        self._source = source
        self._options = options
        self._classes = classes or {}
        if options.tokenizer is not None and options.text is None:
            raise DatasetError("--tokenizer needs --text: the column whose text becomes tokens")
        self._tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer, options.length)
        if options.length is not None and (options.length < 1 or options.text is None):
            raise DatasetError(f"--length {options.length}: it is at least 1 and concerns the column that --text names")

    def _tensor_names(self) -> dict[str, str]:
        """Return the name of the tensor of each column that is kept."""
        options = self._options
        chosen = [name for name in (options.text, options.label) if name is not None]
        wanted = [*chosen, *options.columns] or [*self._source.names()]
        if self._source.is_listed:
            self._check_names(wanted)
        if "__metadata__" in wanted:
            raise DatasetError(
                f"{self._source.paths[0]}: no tensor can have the name of the column '__metadata__'; rename it, or "
                "leave it out by --columns"
            )
        named = {name: name for name in wanted}
        if options.label is not None:
            named[options.label] = LABELS
        if options.text is not None:
            named[options.text] = TEXT
        taken = [*named.values(), *(self._tokenizer.tensors() if self._tokenizer else ())]
        if len(wanted) != len(named) or len(set(taken)) != len(taken):
            twice = next(name for name in wanted if wanted.count(name) > 1 or taken.count(named[name]) > 1)
            raise DatasetError(f"column {quote(twice)} is used twice; name each once, by --text, --label or --columns")
        return named

    def _check_names(self, wanted: Sequence[str]) -> None:
        """Check that the source has these columns.

        Raises:
            DatasetError: it lacks one.
        """
        given = self._source.names()
        for name in wanted:
            if name not in given:
                path = self._source.paths[0]
                raise DatasetError(f"{path}: has no column {quote(name)}; there are {shorten(', '.join(given), 500)}")

    def state(self) -> str:
        """Return a digest of the states of the source's and the tokenizer's files."""
        return files_state([*self._source.paths, *(self._tokenizer.paths if self._tokenizer else ())])

    def scan(self, on_progress: OnProgress) -> Layout:
        """Find kinds, widths and classes; see `hypha_data.sources.reader.SampleReader`."""
        named = self._tensor_names()
        found = {name: _ColumnScan(name, self._source.is_typed, name == self._options.label) for name in named}
        rows = 0
        for block in self._source.blocks([*named]):
            for name, column in found.items():
                column.add(block.columns[name], block.place)
            rows += len(block.numbers)
            on_progress("rows checked", rows)
        if not rows:
            raise DatasetError(f"{self._source.paths[0]}: holds no rows; add them below the names of the columns")
        if empty := [name for name, column in found.items() if not column.kind]:
            self._check_names(empty)
        for column in found.values():
            column.check(self._source.paths[0], partial(self._find_value, column.name))
        label = None if self._options.label is None else found[self._options.label]
        classes = None if label is None else self._classes.get(label.name) or label.class_names()
        return Layout(
            tensors=self._tensors(named, found, classes),
            labels=None if classes is None else tuple(classes),
            kinds={name: column.kind for name, column in found.items()},
            notices=tuple(notice for column in found.values() for notice in column.notices()) or None,
        )

    def _find_value(self, name: str, value: str) -> str:
        """Return file and row of the first value of a column that reads so."""
        for block in self._source.blocks([name]):
            values = block.columns[name]
            for row, found in enumerate(values if isinstance(values, Sequence) else values.to_pylist()):
                if str(found) == value:
                    return block.place(row)
        return str(self._source.paths[0])  # changed meanwhile

    def _tensors(
        self, named: Mapping[str, str], found: Mapping[str, _ColumnScan], classes: Sequence[str] | None
    ) -> dict[str, SampleLayout]:
        made: dict[str, SampleLayout] = {}
        for name, column in found.items():
            is_text = name == self._options.text
            if is_text and self._tokenizer is not None:
                made |= self._tokenizer.tensors()
            elif is_text or (column.kind == TEXT and name != self._options.label):
                limit = self._options.length if is_text else None
                made[named[name]] = SampleLayout(dtype="U8", shape=(min(column.width, limit or column.width) or 1,))
            elif classes is not None and name == self._options.label:
                made[LABELS] = SampleLayout(dtype="I64", shape=())
            else:
                made[named[name]] = SampleLayout(dtype=_TENSORS[column.kind], shape=())
        return made

    def blocks(self, layout: Layout, first: int) -> Iterator[Arrays]:
        """Yield the rows as tensors; see `hypha_data.sources.reader.SampleReader`."""
        named = self._tensor_names()
        size = sum(math.prod(each.shape) * (8 if each.dtype == "I64" else 4) for each in layout.tensors.values())
        most, skip = max(1, BLOCK_BYTES // max(1, size)), first
        for block in self._source.blocks([*named]):
            for begin in range(min(skip, len(block.numbers)), len(block.numbers), most):
                end = min(begin + most, len(block.numbers))
                parts = {name: block.columns[name][begin:end] for name in named}
                arrays = self._convert(layout, named, parts)
                for start in range(0, end - begin, BLOCK_ROWS):
                    yield {name: array[start : start + BLOCK_ROWS] for name, array in arrays.items()}
            skip = max(0, skip - len(block.numbers))

    def _convert(self, layout: Layout, named: Mapping[str, str], parts: Mapping[str, Any]) -> Arrays:
        made: dict[str, NDArray[Any]] = {}
        assert layout.kinds is not None
        for name, values in parts.items():
            tensor, kind = named[name], layout.kinds[name]
            if name == self._options.text and self._tokenizer is not None:
                made |= self._tokenizer.encode(_as_texts(values))
            elif name == self._options.label and layout.labels is not None:
                made[tensor] = _class_numbers(values, layout.labels, kind)
            elif name == self._options.text or kind == TEXT:
                made[tensor] = encode_texts(values, layout.tensors[tensor].shape[0])
            else:
                made[tensor] = _numbers(values, kind)
        return made


@dataclass(slots=True)
class _ColumnScan:
    """What is known of a column after the rows that were read so far."""

    name: str
    is_typed: bool
    is_label: bool
    kind: str = ""
    width: int = 0
    first_gap: str = ""
    first_text: str = ""
    faults: list[str] = field(default_factory=list)
    """Places of values that no number may have; only the first is kept."""
    classes: set[str] = field(default_factory=set)
    lowest: float = 0
    highest: float = 0

    def add(self, values: Any, place: Callable[[int], str]) -> None:
        """Add the values of a block of rows.

        Raises:
            DatasetError: a value has a kind that no tensor can hold.
        """
        if isinstance(values, Sequence):
            self._add_values(values, place)
            return
        with_classes = self.is_label and len(self.classes) <= MAX_CLASSES
        found = arrow_columns.find_facts(values, self.kind, is_typed=self.is_typed, with_classes=with_classes)
        if found is None:
            self._add_values(values.to_pylist(), place)
            return
        if found.first_gap is not None:
            self.first_gap = self.first_gap or place(found.first_gap)
        self.kind, self.width = found.kind or self.kind, max(self.width, found.width)
        self.lowest, self.highest = min(self.lowest, found.lowest), max(self.highest, found.highest)
        self.classes |= found.classes

    def _add_values(self, values: Sequence[Any], place: Callable[[int], str]) -> None:
        present = values
        if any(value is None or value == "" for value in values):
            gap = next(row for row, value in enumerate(values) if value is None or value == "")
            self.first_gap = self.first_gap or place(gap)
            present = [value for value in values if value is not None and value != ""]
        if not present:
            return
        kind = self._kind_of_values(values, place) if self.is_typed else self._kind_of_texts(values, present, place)
        if kind == TEXT:
            self._add_texts(values, present, place)
        else:
            self._add_numbers(values, present, place)
        if not self.is_typed and kind != TEXT:
            self.width = max(self.width, max(map(len, present)))
        if self.is_label and len(self.classes) <= MAX_CLASSES:
            self.classes.update(str(value) for value in present)
        self.kind = kind

    def _kind_of_texts(self, values: Sequence[str], present: Sequence[str], place: Callable[[int], str]) -> str:
        if self.kind in ("", "integer") and all(map(_INTEGER.fullmatch, present)):
            return "integer" if all(-(2**63) <= int(value) < 2**63 for value in present) else "number"
        if self.kind != TEXT and all(map(_NUMBER.fullmatch, present)):
            return "number"
        if self.kind != TEXT:
            row = next(row for row, value in enumerate(values) if value and not _NUMBER.fullmatch(value))
            self.first_text = f"{place(row)}: {quote(values[row])}" if self.kind else ""
        return TEXT

    def _kind_of_values(self, values: Sequence[Any], place: Callable[[int], str]) -> str:
        kind = self.kind
        for row, value in enumerate(values):
            if value is None:
                continue
            found = _KINDS.get(type(value))
            if found == "integer" and not -(2**63) <= value < 2**63:
                found = "number"
            if found is None:
                raise DatasetError(
                    f"{place(row)}, column {quote(self.name)}: {quote(value)} is nested or of an unknown type; a "
                    "column has texts, numbers or booleans: divide it, or leave it out by --columns"
                )
            if kind in ("", found) or (kind, found) == ("integer", "number"):
                kind = found
            elif (kind, found) != ("number", "integer"):
                raise DatasetError(
                    f"{place(row)}, column {quote(self.name)}: {quote(value)} is of kind {found}, and the values "
                    f"before are of kind {kind}; give the column values of one kind"
                )
        return kind

    def _add_texts(self, values: Sequence[Any], present: Sequence[str], place: Callable[[int], str]) -> None:
        width = max(len(value) if value.isascii() else len(value.encode(errors="replace")) for value in present)
        if width > MAX_TEXT:
            row = next(row for row, value in enumerate(values) if value and len(value.encode()) > MAX_TEXT)
            raise DatasetError(
                f"{place(row)}, column {quote(self.name)}: a text of more than {MAX_TEXT} bytes; divide the row"
            )
        self.width = max(self.width, width)

    def _add_numbers(self, values: Sequence[Any], present: Sequence[Any], place: Callable[[int], str]) -> None:
        found = [_as_float(value) for value in present]
        low, high = min(found), max(found)
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        if self.faults or (all(map(math.isfinite, found)) and max(-low, high) <= _FLOAT_LIMIT):
            return
        for row, value in enumerate(values):
            if value is not None and value != "" and not abs(_as_float(value)) <= _FLOAT_LIMIT:
                self.faults.append(f"{place(row)}, column {quote(self.name)}: {quote(value)}")
                return

    def check(self, path: Path, find: Callable[[str], str]) -> None:
        """Check the column after the last row.

        Args:
            path: the first file.
            find: returns file and row of a value of the column.

        Raises:
            DatasetError: a value is missing or cannot be used.
        """
        where = f"column {quote(self.name)}"
        if not self.kind:
            raise DatasetError(f"{self.first_gap}, {where}: no row has a value; leave the column out by --columns")
        what = "a label" if self.is_label else "a number"
        if self.first_gap and (self.kind != TEXT or self.is_label):
            raise DatasetError(
                f"{self.first_gap}, {where}: is empty, and each row needs {what}; fill it in or remove the row"
            )
        if self.kind != TEXT and self.faults:
            raise DatasetError(f"{self.faults[0]} is not {what}; correct it or remove the row")
        if self.is_label:
            self._check_label(path, where, find)

    def _check_label(self, path: Path, where: str, find: Callable[[str], str]) -> None:
        if self.kind == "integer" and not 0 <= self.lowest <= self.highest < 2**31:
            bad = int(self.lowest if self.lowest < 0 else self.highest)
            raise DatasetError(
                f"{find(str(bad))}, {where}: the label {bad} is no class; number the classes from 0, or write their "
                "names"
            )
        if self.kind == TEXT:
            unnamed = [name for name in self.classes if name.strip().lower() in _NO_NAMES]
            if unnamed:
                raise DatasetError(
                    f"{find(min(unnamed))}, {where}: {quote(min(unnamed))} is not a label; correct it or remove the row"
                )
            if len(self.classes) > MAX_CLASSES:
                raise DatasetError(
                    f"{path}, {where}: more than {MAX_CLASSES} different labels; name another column by --label"
                )

    def class_names(self) -> Sequence[str] | None:
        """Return the names of the classes in the order of their numbers; None if labels are numbers."""
        if self.kind == TEXT:
            return sorted(self.classes)
        return ("false", "true") if self.kind == "boolean" else None

    def notices(self) -> Iterator[str]:
        """Yield what the owner should know."""
        if self.first_text and self.kind == TEXT:
            yield f"column {quote(self.name)} is text, because of {self.first_text}; the values before are numbers"


_KINDS: Final[Mapping[type, str]] = {bool: "boolean", int: "integer", float: "number", str: TEXT}


def encode_texts(texts: Any, width: int) -> NDArray[np.uint8]:
    """Return the UTF-8 bytes of each text, cut between characters and padded with zeros to `width`."""
    if not isinstance(texts, Sequence):
        found = arrow_columns.to_bytes(texts, width)
        if found is not None:
            return found
    rows = [_cut(text.encode(), width).ljust(width, b"\0") for text in _as_texts(texts)]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(texts), width)


def _cut(data: bytes, width: int) -> bytes:
    return data if len(data) <= width else data[:width].decode(errors="ignore").encode()


def _as_texts(values: Any) -> list[str]:
    given = values if isinstance(values, Sequence) else values.to_pylist()
    return ["" if value is None else str(value) for value in given]


def _as_float(value: Any) -> float:
    """Return a number; infinity for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _numbers(values: Any, kind: str) -> NDArray[Any]:
    if not isinstance(values, Sequence):
        try:
            return arrow_columns.to_numbers(values, kind)
        except ValueError:  # a number that only Python reads, such as +1
            values = values.to_pylist()
    if kind == "number":
        return np.array([float(value) for value in values], STORED_DTYPES[_TENSORS[kind]])
    return np.array([int(value) for value in values], STORED_DTYPES[_TENSORS[kind]])


def _class_numbers(values: Any, names: Sequence[str], kind: str) -> NDArray[Any]:
    if kind != TEXT:
        return _numbers(values, "integer")
    if not isinstance(values, Sequence):
        return arrow_columns.to_class_numbers(values, names)
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[str(value)] for value in values], np.int64)
