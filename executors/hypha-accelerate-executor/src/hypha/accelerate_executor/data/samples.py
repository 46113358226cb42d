"""Samples of a slice by their numbers: tensors of a safetensors file, or objects of JSON lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def missing_column(column: str, present: Collection[str]) -> RowError:
    """Return the error of a row that lacks a column."""
    return RowError("missing-column", f"there is no column {column!r}, only {', '.join(sorted(present))}")


def is_json(path: Path) -> bool:
    """Return whether a slice has JSON lines, as its name tells."""
    return path.suffix == _JSON_SUFFIX


def open_samples(path: Path) -> TensorSamples | JsonSamples:
    """Open a slice.

    Raises:
        DataError: the file is no slice.
    """
    return JsonSamples(path) if is_json(path) else TensorSamples(path)


class TensorSamples:
    """A safetensors file whose tensors share their first dimension."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DataError: the file is malformed, or its tensors do not share their first dimension.
        """
        try:
            self.file = TensorFile(path)
        except TensorFileError as error:
            raise DataError(f"slice {error}") from None
        counts = {info.shape[0] if info.shape else None for info in self.file.tensors.values()}
        count = counts.pop() if len(counts) == 1 else None
        if not count:
            shapes = {name: list(info.shape) for name, info in self.file.tensors.items()}
            self.file.close()
            raise DataError(f"slice {path.name}: tensors do not share a first dimension of samples: {shapes}")
        self.count = count

    def read(self, rows: NDArray[np.int64], raw: Collection[str] = ()) -> Arrays:
        """Return some samples of all tensors: floats as float32, integers as int64, or float32 for images and sound.

        Args:
            rows: numbers of the samples, from 0.
            raw: tensors whose integers stay as they are stored: inputs of a preprocessor.
        """
        return {name: self.read_tensor(name, rows, name in raw) for name in self.file.tensors}

    def read_tensor(self, name: str, rows: NDArray[np.int64], raw: bool = False) -> NDArray[Any]:
        """Return samples of one tensor."""
        stored, dtype = self.file.stored(name)[rows], self.file.tensors[name].dtype
        if dtype in FLOAT_DTYPES:
            return to_float32(stored, dtype)
        if raw:
            return stored
        return stored.astype(np.float32 if name in FLOAT_INPUTS else np.int64)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


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
        if column not in self.values:
            raise missing_column(column, self.values)
        return self.values[column]


class JsonSamples:
    """A file of JSON lines, one object a sample, each parsed once, when it is used."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            DataError: there is no line.
        """
        self._name = path.name
        self._lines = split_json_lines(path.read_bytes())
        self._parsed: dict[int, dict[str, Any]] = {}
        if not self._lines:
            raise DataError(f"slice {path.name}: no line; a slice has at least one row")

    @property
    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def row(self, number: int) -> dict[str, Any]:
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
                found[place] = JsonRow(name, self.row(number))
            except RowError as error:
                raise DataError(f"{name}: {error.detail}") from None
        return {JSON_ROWS: found}

    def close(self) -> None:
        """Do nothing: the file is closed."""
