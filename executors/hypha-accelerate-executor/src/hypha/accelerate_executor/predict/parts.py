"""Parts: the results of one slice as JSON lines, one for each row, in the order of the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.data.samples import Samples
from hypha.accelerate_executor.errors import RowError
from hypha.accelerate_executor.predict.computation import Result

LINE_LIMIT: Final = 4 << 20
"""Largest number of bytes of a line; schedulers refuse longer ones."""

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def part_name(slice_index: int) -> str:
    """Return the name of a slice's part."""
    return f"part-{slice_index}.jsonl"


class Part:
    """The results of a slice, in any order until they are written."""

    def __init__(self, slice_index: int, rows: Samples, columns: Sequence[str]) -> None:
        """Begin a part.

        Args:
            slice_index: index of the slice in its dataset.
            rows: the slice.
            columns: its columns to copy; a row that lacks one has null.
        """
        self._slice, self._rows, self._columns = slice_index, rows, columns
        self._lines: dict[int, bytes] = {}
        self.errors = 0

    def add(self, row: int, outcome: Result | RowError) -> None:
        """Add the outcome of a row."""
        line = self._encoded(row, outcome.values) if isinstance(outcome, Result) else outcome
        if isinstance(line, RowError):
            self.errors += 1
            line = self._encoded_error(row, line)
        self._lines[row] = line

    def write(self, path: Path) -> int:
        """Write the part; return the number of rows.

        Raises:
            OSError: it cannot be written.
        """
        with path.open("wb") as file:
            file.writelines(self._lines[row] for row in range(self._rows.count))
        return self._rows.count

    def _encoded(self, row: int, values: Mapping[str, Any]) -> bytes | RowError:
        """Return the line of a row with its copied columns, or why they cannot be written."""
        try:
            line = self._line(row, dict(values) | self._copied(row))
        except ValueError as error:  # a column holds what is no JSON or no text
            return RowError("wrong-value", f"a column cannot be written as JSON: {error}")
        except RowError as error:
            return error
        if len(line) > LINE_LIMIT:
            return RowError("too-long", f"the result has {len(line)} bytes of JSON; the limit is {LINE_LIMIT}")
        return line

    def _encoded_error(self, row: int, error: RowError) -> bytes:
        values = _error(error)
        line = self._encoded(row, values)
        return self._line(row, values) if isinstance(line, RowError) else line

    def _copied(self, row: int) -> dict[str, Any]:
        """Return the row's columns to copy."""
        if not self._columns:
            return {}
        present = self._rows.columns_of(row)
        return {column: self._rows.value(row, column) if column in present else None for column in self._columns}

    def _line(self, row: int, values: Mapping[str, Any]) -> bytes:
        line = {"slice": self._slice, "row": row} | dict(values)
        return _ENCODER.encode(line).encode() + b"\n"


def _error(error: RowError) -> dict[str, Any]:
    return {"error": {"kind": error.kind, "detail": error.detail.encode(errors="replace").decode()}}
