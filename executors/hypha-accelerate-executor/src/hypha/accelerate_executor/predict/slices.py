"""Slices read in the order of their rows: safetensors files, or JSON lines.

A safetensors slice holds tensors that share their first dimension, the rows; text is a uint8 tensor of (rows, bytes),
UTF-8, padded with zeros. A slice of JSON lines holds one object for each row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.data.preprocess import decode_text
from hypha.accelerate_executor.data.samples import (
    FLOAT_INPUTS,
    Arrays,
    JsonSamples,
    TensorSamples,
    is_json,
    missing_column,
)
from hypha.accelerate_executor.errors import RowError
from hypha_proto.safetensors_io import FLOAT_DTYPES, to_float32
from hypha_proto.texts import quote


class TensorSlice(TensorSamples):
    """A safetensors slice; its rows are numbered from 0."""

    is_uniform = True
    """Whether all rows have the same columns, with values of the same shape and type."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DataError: the file is malformed, or its tensors do not share their first dimension.
        """
        super().__init__(path)
        self._stored = {name: np.asarray(self.file.stored(name)) for name in self.file.tensors}

    def columns_of(self, row: int) -> Collection[str]:
        """Return the names of a row's columns: those of the tensors."""
        return self.file.tensors.keys()

    def value(self, row: int, column: str) -> Any:
        """Return a row's value as JSON value: a number, a boolean, text (uint8 in one dimension), or lists of numbers.

        Raises:
            RowError: the row has no such column, or is malformed.
        """
        self._check(column)
        stored, dtype = self._stored[column][row : row + 1], self.file.tensors[column].dtype
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
        for column in columns:
            self._check(column)
        numbers = np.asarray(rows, dtype=np.int64)
        return {column: self.read_tensor(column, numbers, column in raw) for column in columns}

    def close(self) -> None:
        """Close the file."""
        self._stored = {}
        super().close()

    def _check(self, column: str) -> None:
        if column not in self.file.tensors:
            raise missing_column(column, self.file.tensors)


class JsonSlice(JsonSamples):
    """A slice of JSON lines, each parsed once, when its row is used."""

    is_uniform = False

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            DataError: there is no line.
        """
        super().__init__(path)
        self._floats: dict[str, bool] = {}

    def columns_of(self, row: int) -> Collection[str]:
        """Return the keys of a row."""
        return self.row(row).keys()

    def value(self, row: int, column: str) -> Any:
        """Return a row's value."""
        found = self.row(row)
        if column not in found:
            raise missing_column(column, found)
        return found[column]

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
        return np.frombuffer(_encoded(column, value), dtype=np.uint8)

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


SliceRows = TensorSlice | JsonSlice
"""Rows of one slice."""


def open_slice(path: Path) -> SliceRows:
    """Open a slice, whose format is told by its name.

    Raises:
        DataError: the file is not a slice.
    """
    return JsonSlice(path) if is_json(path) else TensorSlice(path)


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


def _as_numbers(column: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:
        raise RowError("wrong-type", f"column {column!r}: its lists differ in length") from None
    if array.dtype.kind not in "biuf":
        raise RowError("wrong-type", f"column {column!r} holds {quote(value)}; expected numbers")
    return array


def _encoded(column: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RowError("wrong-value", f"column {column!r} holds half of a surrogate pair, which is no text") from None


def _without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None."""
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value if math.isfinite(value) else None
