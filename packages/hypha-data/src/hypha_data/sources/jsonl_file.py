"""Rows of JSONL files as a table: the keys are the columns, of which a row may lack some."""

from __future__ import annotations

import json
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
    is_listed = False

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read rows of files."""
        self._is_checked = False
        """Whether all rows have been read and are valid."""
        self.paths: Sequence[Path] = tuple(paths)
        self._names: tuple[str, ...] | None = None

    def names(self) -> Sequence[str]:
        """Return the keys of all rows in the order in which they first occur; reads the files at the first call.

        Raises:
            DatasetError: a row is not valid, or there is none.
        """
        if self._names is None:
            found: dict[str, None] = {}
            for place, line in self._lines():
                [row] = self._parse([place], [line])
                found.update(dict.fromkeys(row))
                if len(found) > MAX_COLUMNS:
                    raise DatasetError(
                        f"{place[0]}: more than {MAX_COLUMNS} different keys; put those that vary in an object"
                    )
            if not found:
                raise DatasetError(f"{self.paths[0]}: holds no rows; write one JSON object a line")
            self._names = tuple(found)
        return self._names

    def classes(self, column: str) -> Sequence[str] | None:
        """Return None: JSON does not name classes."""
        return None

    def _lines(self) -> Iterator[tuple[tuple[Path, int], bytes]]:
        """Yield file and number of each line, and its content."""
        for path in self.paths:
            with open_plain(path) as file:
                number = 0
                while line := file.readline(MAX_LINE + 2):
                    number += 1
                    yield (path, number), line

    def _parse(self, places: Sequence[tuple[Path, int]], lines: Sequence[bytes]) -> list[dict[str, Any]]:
        if self._is_checked:
            valid: list[dict[str, Any]] = json.loads(b"[" + b",".join(lines) + b"]")
            return valid
        rows = []
        for (path, number), line in zip(places, lines, strict=True):
            try:
                rows.append(parse_row(line))
            except RowFormatError as error:
                raise DatasetError(f"{path}, line {number}: {error}") from None
        return rows

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows, which are checked the first time; see `hypha_data.sources.table.RowSource`."""
        places: list[tuple[Path, int]] = []
        lines: list[bytes] = []
        size = 0
        for place, line in self._lines():
            places.append(place)
            lines.append(line)
            size += len(line)
            if len(lines) == BLOCK_ROWS or size >= _BLOCK_TEXT:
                yield _block(columns, self._parse(places, lines), places)
                places, lines, size = [], [], 0
        if lines:
            yield _block(columns, self._parse(places, lines), places)
        self._is_checked = True


def _block(columns: Sequence[str], rows: Sequence[dict[str, Any]], places: Sequence[tuple[Path, int]]) -> RowBlock:
    return RowBlock({name: [row.get(name) for row in rows] for name in columns}, partial(_place, places), len(rows))


def _place(places: Sequence[tuple[Path, int]], row: int) -> str:
    path, number = places[row]
    return f"{path}, line {number}"
