"""Rows of csv files (RFC 4180): the first line has the names of the columns. Cells are text, and typed by `table`.

Parts of the file without quotes are read by pyarrow if it is installed. All others, and all in which it finds a fault,
are read by the module csv, which names the line.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from hypha_data.errors import DatasetError
from hypha_data.sources.arrow_columns import import_arrow
from hypha_data.sources.plain_bytes import open_plain
from hypha_data.sources.reader import MAX_TEXT
from hypha_data.sources.table import RowBlock
from hypha_data.sources.text_encoding import MAX_LINE, check_encoding, decode_lines
from hypha_proto.texts import quote

_BLOCK_TEXT: Final = 1 << 19
"""Bytes of the lines of a block, about; less than a cell may have."""
_DELIMITERS: Final = ",;\t|"


class CsvFile:
    """Rows of one csv file; a `hypha_data.sources.table.RowSource`."""

    is_typed = False
    is_listed = True

    def __init__(self, path: Path, encoding: str = "utf-8", delimiter: str | None = None) -> None:
        """Read the names of the columns.

        Raises:
            DatasetError: there are none, or the encoding is unknown.
        """
        self.path = path
        self.paths: Sequence[Path] = (path,)
        self._encoding = check_encoding(encoding)
        self._arrow = import_arrow()
        if delimiter is not None and len(delimiter) != 1:
            raise DatasetError(f"--delimiter {delimiter!r}: it is one character")
        self._delimiter = delimiter or ""
        with open_plain(path) as file:
            self._names = tuple(self._read_names(file)[1])
        self._check_names()

    def _read_names(self, file: BinaryIO) -> tuple[int, list[str]]:
        """Read the names of the columns, at the beginning of the file; return the number of their last line, and them.

        The delimiter is that of the first line, if none is given.
        """
        lines = decode_lines(self.path, file, self._encoding)
        head = next(lines, "")
        self._delimiter = self._delimiter or max(_DELIMITERS, key=head.count)
        return next(self._rows(itertools.chain([head], lines), 1), (0, []))

    def _check_names(self) -> None:
        if not any(self._names):
            raise DatasetError(f"{self.path}: holds no rows; its first line must have the names of the columns")
        seen: set[str] = set()
        for number, name in enumerate(self._names, 1):
            if not name or name in seen:
                fault = "occurs twice" if name else "is empty"
                raise DatasetError(
                    f"{self.path}, line 1: the name of column {number} ({quote(name)}) {fault}; rename it"
                )
            seen.add(name)

    def _rows(self, lines: Iterator[str], first: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows of lines that begin with line `first`, each with the number of its last line.

        Raises:
            DatasetError: a row is not valid, or cannot be decoded.
        """
        csv.field_size_limit(MAX_TEXT)
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        try:
            for row in reader:
                yield first - 1 + reader.line_num, row
        except csv.Error as error:
            raise DatasetError(
                f"{self.path}, line {first - 1 + reader.line_num}: {error}; put a cell with quotes, delimiters or line "
                'breaks in quotes, and double the quotes in it: "a ""b"" c"'
            ) from None

    def names(self) -> Sequence[str]:
        """Return the names of the columns."""
        return self._names

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows; see `hypha_data.sources.table.RowSource`.

        Raises:
            DatasetError: a row has more or fewer cells than there are columns, or cannot be decoded.
        """
        with open_plain(self.path) as file:
            line = self._read_names(file)[0] + 1
            while text := file.read(_BLOCK_TEXT):
                text += file.readline(MAX_LINE + 1)
                block = self._parse(text, columns, line)
                if block is None:
                    block, line = self._read(file, text, columns, line)
                else:
                    line += len(block.numbers)
                if block.numbers:
                    yield block

    def _parse(self, text: bytes, columns: Sequence[str], first: int) -> RowBlock | None:
        """Return the rows of some lines; None if they may not be plain: one row a line, without quotes."""
        quotes = b'"' in text or text.count(b"\r") != text.count(b"\r\n")
        if self._arrow is None or self._encoding != "utf-8" or not self._delimiter.isascii() or quotes:
            return None
        if len(text) > MAX_TEXT:
            return None
        parser = self._arrow.csv
        try:
            text.decode()  # raises ValueError if it is no UTF-8
            table = parser.read_csv(
                self._arrow.BufferReader(text),
                parser.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=self._names),
                parser.ParseOptions(delimiter=self._delimiter, quote_char=False),
                parser.ConvertOptions(
                    include_columns=[*columns],
                    column_types=dict.fromkeys(columns, self._arrow.string()),
                    strings_can_be_null=False,
                ),
            )
        except (self._arrow.ArrowException, ValueError):
            return None
        if table.num_rows != _count_lines(text):  # some lines are empty
            return None
        values = {name: table.column(name).combine_chunks() for name in columns}
        return RowBlock(values, self.path, range(first, first + table.num_rows))

    def _read(self, file: BinaryIO, text: bytes, columns: Sequence[str], first: int) -> tuple[RowBlock, int]:
        """Read rows up to the one that ends with `text`, or later if its last cell does; the file is at its end.

        Returns:
            The rows, and the number of the line that follows on them.
        """
        width, last = len(self._names), first - 1 + _count_lines(text)
        line, found, lines = first - 1, list[list[str]](), list[int]()
        for line, row in self._rows(self._decode(file, text, first), first):
            if row and len(row) != width:
                raise DatasetError(
                    f"{self.path}, line {line}: {len(row)} cells, and the first line names {width} columns; add or "
                    f"remove cells, or put those with {self._delimiter!r} in quotes"
                )
            if row:  # not an empty line
                found.append(row)
                lines.append(line)
            if line >= last:
                break
        return RowBlock(self._columns(columns, found), self.path, lines), line + 1

    def _decode(self, file: BinaryIO, text: bytes, first: int) -> Iterator[str]:
        """Return the lines of `text` and those that follow in the file."""
        try:
            decoded = text.decode(self._encoding) if len(text) <= MAX_TEXT else ""
        except UnicodeDecodeError:  # which line is to be named
            decoded = ""
        lines: Iterator[str] = io.StringIO(decoded, newline="\n")
        if not decoded:
            lines = decode_lines(self.path, io.BytesIO(text), self._encoding, first)
        return itertools.chain(lines, decode_lines(self.path, file, self._encoding, first + _count_lines(text)))

    def _columns(self, columns: Sequence[str], rows: list[list[str]]) -> Mapping[str, Sequence[Any]]:
        places = {name: self._names.index(name) for name in columns}
        values = {name: [row[place] for row in rows] for name, place in places.items()}
        if self._arrow is None:
            return values
        try:
            return {name: self._arrow.array(each, self._arrow.string()) for name, each in values.items()}
        except ValueError:  # half of a surrogate pair, which only some encodings have
            return values


def _count_lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))
