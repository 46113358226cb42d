"""Rows of JSONL files as a table: the keys are the columns, of which a row may lack some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from hypha_data.errors import DatasetError
from hypha_data.jsonl import MAX_COLUMNS, MAX_LINE, RowFormatError, parse_row
from hypha_data.sources.plain_bytes import open_plain
from hypha_data.sources.reader import BLOCK_ROWS
from hypha_data.sources.table import RowBlock

_BLOCK_TEXT: Final = 4 << 20


class JsonlFiles:
    """Rows of JSONL files, one file after the other; a `hypha_data.sources.table.RowSource`."""

    is_typed = True

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read rows of files."""
        self.paths: Sequence[Path] = tuple(paths)
        self._names: tuple[str, ...] | None = None

    def names(self) -> Sequence[str]:
        """Return the keys of all rows in the order in which they first occur; reads the files at the first call.

        Raises:
            DatasetError: a row is not valid, or there is none.
        """
        if self._names is None:
            found: dict[str, None] = {}
            for path, _, row, _ in self._rows():
                found.update(dict.fromkeys(row))
                if len(found) > MAX_COLUMNS:
                    raise DatasetError(
                        f"{path}: more than {MAX_COLUMNS} different keys; put those that vary in an object"
                    )
            if not found:
                raise DatasetError(f"{self.paths[0]}: holds no rows; write one JSON object a line")
            self._names = tuple(found)
        return self._names

    def classes(self, column: str) -> Sequence[str] | None:
        """Return None: JSON does not name classes."""
        return None

    def _rows(self) -> Iterator[tuple[Path, int, dict[str, Any], int]]:
        """Yield the file and the number of each line, its row and its length."""
        for path in self.paths:
            with open_plain(path) as file:
                number = 0
                while line := file.readline(MAX_LINE + 2):
                    number += 1
                    try:
                        row = parse_row(line)
                    except RowFormatError as error:
                        raise DatasetError(f"{path}, line {number}: {error}") from None
                    yield path, number, row, len(line)

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows; see `hypha_data.sources.table.RowSource`."""
        rows: list[dict[str, Any]] = []
        lines: list[tuple[Path, int]] = []
        size = 0
        for path, number, row, length in self._rows():
            rows.append(row)
            lines.append((path, number))
            size += length
            if len(rows) == BLOCK_ROWS or size >= _BLOCK_TEXT:
                yield _block(columns, rows, lines)
                rows, lines, size = [], [], 0
        if rows:
            yield _block(columns, rows, lines)


def _block(columns: Sequence[str], rows: Sequence[dict[str, Any]], lines: Sequence[tuple[Path, int]]) -> RowBlock:
    return RowBlock({name: [row.get(name) for row in rows] for name in columns}, partial(_place, lines), len(rows))


def _place(lines: Sequence[tuple[Path, int]], row: int) -> str:
    path, number = lines[row]
    return f"{path}, line {number}"
