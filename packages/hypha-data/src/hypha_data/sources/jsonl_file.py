"""Rows of JSONL files as a table: the keys are the columns, of which a row may lack some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from hypha_data.errors import DatasetError
from hypha_data.jsonl import MAX_COLUMNS, MAX_LINE, RowFormatError, parse_row
from hypha_data.sources.reader import BLOCK_ROWS
from hypha_data.sources.table import RowBlock

_BLOCK_TEXT: Final = 4 << 20


class JsonlFile:
    """Rows of one JSONL file; a `hypha_data.sources.table.RowSource`."""

    is_typed = True

    def __init__(self, path: Path) -> None:
        """Read rows of the file."""
        self.path = path
        self.paths: Sequence[Path] = (path,)
        self._names: tuple[str, ...] | None = None

    def names(self) -> Sequence[str]:
        """Return the keys of all rows in the order in which they first occur; reads the file at the first call.

        Raises:
            DatasetError: a row is not valid, or there is none.
        """
        if self._names is None:
            found: dict[str, None] = {}
            for _, row, _ in self._rows():
                found.update(dict.fromkeys(row))
                if len(found) > MAX_COLUMNS:
                    raise DatasetError(
                        f"{self.path}: more than {MAX_COLUMNS} different keys; put those that vary in an object"
                    )
            if not found:
                raise DatasetError(f"{self.path}: holds no rows; write one JSON object a line")
            self._names = tuple(found)
        return self._names

    def classes(self, column: str) -> Sequence[str] | None:
        """Return None: JSON does not name classes."""
        return None

    def _rows(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yield the number of each line, its row and its length."""
        with self.path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 2):
                number += 1
                try:
                    yield number, parse_row(line), len(line)
                except RowFormatError as error:
                    raise DatasetError(f"{self.path}, line {number}: {error}") from None

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows; see `hypha_data.sources.table.RowSource`."""
        rows: list[dict[str, Any]] = []
        size, first = 0, 1
        for number, row, length in self._rows():
            rows.append(row)
            size += length
            if len(rows) == BLOCK_ROWS or size >= _BLOCK_TEXT:
                yield self._block(columns, rows, first)
                rows, size, first = [], 0, number + 1
        if rows:
            yield self._block(columns, rows, first)

    def _block(self, columns: Sequence[str], rows: list[dict[str, Any]], first: int) -> RowBlock:
        values = {name: [row.get(name) for row in rows] for name in columns}
        return RowBlock(values, partial(_place, self.path, first), len(rows))


def _place(path: Path, first: int, row: int) -> str:
    return f"{path}, line {first + row}"
