"""Samples of a slice by their numbers: tensors of a safetensors file, or objects of JSON lines.

A safetensors slice holds tensors that share their first dimension, the samples; text is a uint8 tensor of (samples,
bytes), UTF-8, padded with zeros. A slice of JSON lines holds one object for each sample. Training reads whole batches,
inference the columns that its model takes, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.errors import DataError, RowError
from hypha_proto.codec import parse_json, split_json_lines
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.safetensors_io import FLOAT_DTYPES, TensorFile, to_float32
from hypha_proto.texts import quote

FLOAT_INPUTS: Final = ("pixel_values", "input_values", "input_features")
JSON_ROWS: Final = "rows"
"""Column of the samples of JSON lines: an object array of `JsonRow`."""
_JSON_SUFFIX: Final = ".jsonl"
Arrays = Mapping[str, NDArray[Any]]


class TensorSamples:
    """A safetensors file whose tensors share their first dimension.

    Attributes:
        count: number of samples.
    """

    is_uniform = True
    """Whether all rows have the same columns, with values of the same shape and type."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DataError: the file is malformed, or its tensors do not share their first dimension.
        """
        try:
            self._file = TensorFile(path)
        except TensorFileError as error:
            raise DataError(f"slice {error}") from None
        counts = {info.shape[0] if info.shape else None for info in self._file.tensors.values()}
        count = counts.pop() if len(counts) == 1 else None
        if not count:
            shapes = {name: list(info.shape) for name, info in self._file.tensors.items()}
            self._file.close()
            raise DataError(f"slice {path.name}: tensors do not share a first dimension of samples: {shapes}")
        self.count = count
        self._stored = {name: np.asarray(self._file.stored(name)) for name in self._file.tensors}

    def read(self, rows: NDArray[np.int64], raw: Collection[str] = ()) -> Arrays:
        """Return some samples of all tensors: floats as float32, integers as int64, or float32 for images and sound.

        Args:
            rows: numbers of the samples, from 0.
            raw: tensors whose integers stay as they are stored: inputs of a preprocessor.
        """
        return {name: self._read(name, rows, name in raw) for name in self._stored}

    def columns_of(self, row: int) -> Collection[str]:
        """Return the names of a row's columns: those of the tensors."""
        return self._stored.keys()

    def value(self, row: int, column: str) -> Any:
        """Return a row's value as JSON value: a number, a boolean, text (uint8 in one dimension), or lists of numbers.

        Raises:
            RowError: the row has no such column, or is malformed.
        """
        stored, dtype = _value(self._stored, column)[row : row + 1], self._file.tensors[column].dtype
        if stored.dtype == np.uint8 and stored.ndim == 2:
            return decode_text(stored)[0]
        values = to_float32(stored, dtype) if dtype == "BF16" else stored
        return _without_nan(values[0].tolist()) if dtype in FLOAT_DTYPES else values[0].tolist()

    def arrays(
        self, rows: Sequence[int], columns: Collection[str], raw: Collection[str], texts: Collection[str] = ()
    ) -> Arrays:
        """Return columns of some rows, stacked: floats as float32, integers as int64.

        Args:
            rows: numbers of the rows.
            columns: columns to read; those that a row lacks raise an error.
            raw: columns whose integers stay as they are stored: inputs of a preprocessor.
            texts: columns that hold text. Others hold numbers: floats if any row of the slice has one, else integers.

        Raises:
            RowError: a row lacks a column, or has a value that is no array.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        return {column: self._read(column, numbers, column in raw) for column in columns}

    def _read(self, name: str, rows: NDArray[np.int64], raw: bool) -> NDArray[Any]:
        stored: NDArray[Any] = _value(self._stored, name)[rows]
        dtype = self._file.tensors[name].dtype
        if dtype in FLOAT_DTYPES:
            return to_float32(stored, dtype)
        return stored if raw else stored.astype(np.float32 if name in FLOAT_INPUTS else np.int64)

    def close(self) -> None:
        """Close the file."""
        self._stored = {}
        self._file.close()


@dataclass(frozen=True, slots=True)
class JsonRow:
    """One object of JSON lines."""

    place: str
    """File and row, for errors."""
    values: Mapping[str, Any]

    def value(self, column: str) -> Any:
        """Return the value of a column.

        Raises:
            RowError: there is none.
        """
        return _value(self.values, column)


class JsonSamples:
    """A file of JSON lines, one object a sample, each parsed once, when it is used; see `TensorSamples`."""

    is_uniform = False

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            DataError: there is no line.
        """
        self._name = path.name
        self._lines = split_json_lines(path.read_bytes())
        self._parsed: dict[int, dict[str, Any]] = {}
        self._floats: dict[str, bool] = {}
        if not self._lines:
            raise DataError(f"slice {path.name}: no line; a slice has at least one row")
        self.count = len(self._lines)

    def _row(self, number: int) -> dict[str, Any]:
        """Return the object of a line.

        Raises:
            RowError: the line is no JSON object.
        """
        if number not in self._parsed:
            try:
                value = parse_json(self._lines[number])
            except DecodeError as error:
                raise RowError("not-json", str(error)) from None
            if type(value) is not dict:
                raise RowError("not-json", f"expected an object, not {quote(value)}")
            self._parsed[number] = value
        return self._parsed[number]

    def read(self, rows: NDArray[np.int64], raw: Collection[str] = ()) -> Arrays:
        """Return some lines as the column `JSON_ROWS`.

        Raises:
            DataError: a line is no JSON object.
        """
        found = np.empty(len(rows), dtype=object)
        for place, number in enumerate(rows.tolist()):
            name = f"{self._name}, row {number}"
            try:
                found[place] = JsonRow(name, self._row(number))
            except RowError as error:
                raise DataError(f"{name}: {error.detail}") from None
        return {JSON_ROWS: found}

    def columns_of(self, row: int) -> Collection[str]:
        """Return the keys of a row."""
        return self._row(row).keys()

    def value(self, row: int, column: str) -> Any:
        """Return a row's value."""
        return _value(self._row(row), column)

    def arrays(
        self, rows: Sequence[int], columns: Collection[str], raw: Collection[str], texts: Collection[str] = ()
    ) -> Arrays:
        """Return columns of some rows; text is encoded as `decode_text` reads it."""
        return {
            column: _stack(
                [self._text(row, column) if column in texts else self._numbers(row, column, raw) for row in rows]
            )
            for column in columns
        }

    def _text(self, row: int, column: str) -> NDArray[Any]:
        value = self.value(row, column)
        if not isinstance(value, str):
            raise RowError("wrong-type", f"column {column!r} holds {quote(value)}; expected text")
        try:
            return np.frombuffer(value.encode(), dtype=np.uint8)
        except UnicodeEncodeError:
            fault = f"column {column!r} holds half of a surrogate pair, which is no text"
            raise RowError("wrong-value", fault) from None

    def _numbers(self, row: int, column: str, raw: Collection[str]) -> NDArray[Any]:
        array = _as_numbers(column, self.value(row, column))
        if self._holds_floats(column) or (column in FLOAT_INPUTS and column not in raw):
            with np.errstate(over="ignore"):  # too large numbers become infinite
                return array.astype(np.float32)
        return array.astype(np.int64)

    def _holds_floats(self, column: str) -> bool:
        """Return whether any row of a column has a float: JSON may write 1.0 as 1, and a column has one type."""
        if column not in self._floats:
            self._floats[column] = any(self._is_float(row, column) for row in range(self.count))
        return self._floats[column]

    def _is_float(self, row: int, column: str) -> bool:
        try:
            array = _as_numbers(column, self.value(row, column))
        except RowError:  # is recorded with its own row
            return False
        return array.dtype.kind == "f" and array.size > 0

    def close(self) -> None:
        """Do nothing: the file is closed."""


Samples = TensorSamples | JsonSamples
"""Samples of one slice."""


def open_samples(path: Path) -> Samples:
    """Open a slice, whose format is told by its name.

    Raises:
        DataError: the file is no slice.
    """
    return JsonSamples(path) if path.suffix == _JSON_SUFFIX else TensorSamples(path)


def decode_text(rows: NDArray[Any]) -> list[str]:
    """Decode each row's bytes as UTF-8, without the zero padding.

    Raises:
        TypeError: the tensor is not uint8.
    """
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise TypeError(f"text must be a uint8 tensor of shape (samples, bytes), not {rows.dtype} {list(rows.shape)}")
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def join_rows(batches: Sequence[Arrays]) -> Arrays:
    """Return one batch of several, which have the same columns; text is padded with zeros.

    Raises:
        ValueError: values of a column differ in shape.
    """
    if len(batches) == 1:
        return batches[0]
    return {column: _join([batch[column] for batch in batches]) for column in batches[0]}


def _join(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if all(value.dtype == np.uint8 and value.ndim == 2 for value in values):
        return _stack([row for value in values for row in value])
    return np.concatenate(values)


def _stack(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack the values of rows; text is padded with zeros."""
    if len(values) > 1 and all(value.dtype == np.uint8 and value.ndim == 1 for value in values):
        padded = np.zeros((len(values), max(value.size for value in values)), dtype=np.uint8)
        for line, value in zip(padded, values, strict=True):
            line[: value.size] = value
        return padded
    return np.stack(values)


def _value(values: Mapping[str, Any], column: str) -> Any:
    if column not in values:
        raise RowError("missing-column", f"there is no column {column!r}, only {', '.join(sorted(values))}")
    return values[column]


def _as_numbers(column: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise RowError("wrong-type", f"column {column!r}: its lists differ in length") from None
    if array.dtype.kind not in "biuf":
        raise RowError("wrong-type", f"column {column!r} holds {quote(value)}; expected numbers")
    return array


def _without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None."""
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value if math.isfinite(value) else None
