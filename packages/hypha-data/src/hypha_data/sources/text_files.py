"""Text files: rows of N bytes or tokens, which follow each other without gaps, or a sample a line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from hypha_data.errors import DatasetError
from hypha_data.sources.options import ReadOptions
from hypha_data.sources.plain_bytes import open_plain
from hypha_data.sources.reader import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    Arrays,
    Layout,
    OnProgress,
    SampleLayout,
    files_state,
    in_blocks,
)
from hypha_data.sources.table import TEXT, RowBlock
from hypha_data.sources.text_encoding import check_encoding, decode_lines
from hypha_data.sources.tokenizer import MAX_LENGTH, Tokenizer

_BLOCK_TEXT: Final = 1 << 20


class TextLines:
    """Lines of text files as a table with the column ``text``; a `hypha_data.sources.table.RowSource`."""

    is_typed = True
    is_listed = True

    def __init__(self, paths: Sequence[Path], encoding: str) -> None:
        """Read lines of files, one file after the other."""
        self.paths: Sequence[Path] = tuple(paths)
        self._encoding = check_encoding(encoding)

    def names(self) -> Sequence[str]:
        """Return the only column's name."""
        return (TEXT,)

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all lines that are not empty; see `hypha_data.sources.table.RowSource`."""
        for path in self.paths:
            with open_plain(path) as file:
                lines = enumerate(decode_lines(path, file, self._encoding), 1)
                texts = ((number, text) for number, line in lines if (text := line.rstrip("\r\n")))
                for block in in_blocks(texts, BLOCK_ROWS, _BLOCK_TEXT, lambda line: len(line[1])):
                    numbers, values = zip(*block, strict=True)
                    yield RowBlock({TEXT: values}, path, numbers)


def _has_content(path: Path) -> bool:
    with open_plain(path) as file:
        return bool(file.read(1))


class TextReader:
    """Reader of rows of `length` bytes or tokens; a `hypha_data.sources.reader.SampleReader`.

    No row has text of two files; a file's last row is padded, where ``attention_mask`` is 0.
    """

    def __init__(self, paths: Sequence[Path], options: ReadOptions) -> None:
        """Read files one after the other.

        Raises:
            DatasetError: no length is given, or the tokenizer cannot be loaded.
        """
        self._paths = tuple(paths)
        self._tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer, options.length)
        if options.length is None or not 1 <= options.length <= MAX_LENGTH:
            raise DatasetError(
                f"{paths[0]}: text needs --length, the bytes (tokens with --tokenizer) of a row, from 1 to "
                f"{MAX_LENGTH}; or --lines, where each line is a sample"
            )
        self._length = options.length
        self._encoding = check_encoding(options.encoding)

    def state(self) -> str:
        """Return a digest of the states of the source's and the tokenizer's files."""
        return files_state([*self._paths, *(self._tokenizer.paths if self._tokenizer else ())])

    def scan(self, on_progress: OnProgress) -> Layout:
        """Return the layout, for which nothing is read."""
        if not any(map(_has_content, self._paths)):
            raise DatasetError(f"{self._paths[0]}: holds no text; name a file, or a folder of *.txt, that does")
        if self._tokenizer is not None:
            return Layout(tensors=self._tokenizer.tensors())
        shape = (self._length,)
        return Layout(
            tensors={
                "input_ids": SampleLayout(dtype="I16", shape=shape),
                "attention_mask": SampleLayout(dtype="U8", shape=shape),
            }
        )

    def blocks(self, layout: Layout, first: int) -> Iterator[Arrays]:
        """Yield the rows; see `hypha_data.sources.reader.SampleReader`."""
        most = max(1, min(BLOCK_ROWS, BLOCK_BYTES // (8 * self._length)))
        if self._tokenizer is None:
            yield from self._byte_blocks(most, first)
            return
        rows = itertools.islice(self._rows(self._tokenizer), first, None)
        yield from map(self._tokenizer.fill, in_blocks(rows, most))

    def _byte_blocks(self, most: int, skip: int) -> Iterator[Arrays]:
        """Yield rows of bytes, at most `most` at once, without the first `skip`."""
        for path in self._paths:
            with open_plain(path) as file:
                while data := file.read(most * self._length):
                    rows = -(-len(data) // self._length)
                    numbers, mask = np.zeros(rows * self._length, "<i2"), np.zeros(rows * self._length, np.uint8)
                    numbers[: len(data)], mask[: len(data)] = np.frombuffer(data, np.uint8), 1
                    if skip < rows:
                        made = {"input_ids": numbers, "attention_mask": mask}
                        yield {name: array.reshape(rows, self._length)[skip:] for name, array in made.items()}
                    skip = max(0, skip - rows)

    def _rows(self, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
        for path in self._paths:
            rest: list[int] = []
            start = 0
            for text in self._parts(path):
                rest = [*rest[start:], *tokenizer.tokens(text)]
                start = 0
                while len(rest) - start >= self._length:
                    yield rest[start : start + self._length]
                    start += self._length
            if rest[start:]:
                yield rest[start:]

    def _parts(self, path: Path) -> Iterator[str]:
        """Yield the text of a file in parts of whole lines, which do not depend on the row length."""
        with open_plain(path) as file:
            lines = decode_lines(path, file, self._encoding)
            yield from map("".join, in_blocks(lines, _BLOCK_TEXT, 1 << 16, len))
