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
from hypha_data.sources.reader import BLOCK_ROWS, in_blocks
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
            for path in self.paths:
                for number, line in _lines(path):
                    [row] = self._parse(path, [(number, line)])
                    found.update(dict.fromkeys(row))
                    if len(found) > MAX_COLUMNS:
                        raise DatasetError(
                            f"{path}: more than {MAX_COLUMNS} different keys; put those that vary in an object"
                        )
            if not found:
                raise DatasetError(f"{self.paths[0]}: holds no rows; write one JSON object a line")
            self._names = tuple(found)
        return self._names

    def _parse(self, path: Path, lines: Sequence[tuple[int, bytes]]) -> list[dict[str, Any]]:
        if self._is_checked:
            valid: list[dict[str, Any]] = json.loads(b"[" + b",".join(line for _, line in lines) + b"]")
            return valid
        rows = []
        for number, line in lines:
            try:
                rows.append(parse_row(line))
            except RowFormatError as error:
                raise DatasetError(f"{path}, line {number}: {error}") from None
        return rows

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows, which are checked the first time; see `hypha_data.sources.table.RowSource`."""
        for path in self.paths:
            for lines in in_blocks(_lines(path), BLOCK_ROWS, _BLOCK_TEXT, lambda line: len(line[1])):
                rows = self._parse(path, lines)
                values = {name: [row.get(name) for row in rows] for name in columns}
                yield RowBlock(values, path, [number for number, _ in lines])
        self._is_checked = True


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, and its content."""
    with open_plain(path) as file:
        yield from enumerate(iter(partial(file.readline, MAX_LINE + 2), b""), 1)
