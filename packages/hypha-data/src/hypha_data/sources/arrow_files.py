"""Rows of Parquet files, and of Arrow files as the library datasets writes them. Needs the extra ``formats``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hypha_data.errors import DatasetError
from hypha_data.sources.reader import import_extra
from hypha_data.sources.table import RowBlock
from hypha_proto.texts import quote

_ROWS: Final = 8192
"""Largest number of rows of a block."""
_BLOCK_BYTES: Final = 4 << 20
"""Size of a block, about, if more than one row fits."""
_BUFFER: Final = 1 << 20


class ArrowFile:
    """Rows of one file; a `hypha_data.sources.table.RowSource`."""

    is_typed = True
    is_listed = True

    def __init__(self, path: Path) -> None:
        """Read the names and types of the columns of a ``*.parquet``, or an Arrow file.

        Raises:
            DatasetError: the file cannot be read.
        """
        self._path = path
        self.paths: Sequence[Path] = (path,)
        self._arrow = import_extra("pyarrow", "reading Parquet or Arrow files")
        with self._open() as file:
            schema = file.schema_arrow if _is_parquet(path) else file.schema
            self._types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
        if len(self._types) < len(schema.names):
            raise DatasetError(f"{path}: the name of a column occurs twice; rename it")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file, and convert pyarrow's errors.

        Of a Parquet file a buffer is read at a time, an Arrow file is memory-mapped.
        """
        arrow, path = self._arrow, self._path
        try:
            if _is_parquet(path):
                parquet = import_extra("pyarrow.parquet", "reading Parquet files")
                with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
                    yield file
                return
            ipc = import_extra("pyarrow.ipc", "reading Arrow files")
            with arrow.memory_map(str(path)) as mapped:
                try:
                    opened = ipc.open_stream(mapped)
                except arrow.ArrowInvalid:  # the format for random access
                    mapped.seek(0)
                    whole = ipc.open_file(mapped)
                    batches = map(whole.get_batch, range(whole.num_record_batches))
                    opened = ipc.RecordBatchReader.from_batches(whole.schema, batches)
                yield opened
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise DatasetError(f"{path}: damaged, or another format: {quote(reason)}; write the file again") from None

    def names(self) -> Sequence[str]:
        """Return the names of the columns."""
        return tuple(self._types)

    def _check_types(self, columns: Sequence[str]) -> None:
        types = self._arrow.types
        for name in columns:
            kind = self._types[name]
            kind = kind.value_type if types.is_dictionary(kind) else kind
            known = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
            if not any(is_kind(kind) for is_kind in (*known, types.is_null)):
                fault = "nested" if types.is_nested(kind) else "not text, a number or a boolean"
                raise DatasetError(
                    f"{self._path}, column {quote(name)}: its type {quote(str(kind))} is {fault}; leave it out by "
                    "--columns, or write it as columns of numbers or text"
                )

    def blocks(self, columns: Sequence[str]) -> Iterator[RowBlock]:
        """Yield all rows; see `hypha_data.sources.table.RowSource`.

        Raises:
            DatasetError: a column is nested, or the file is damaged.
        """
        self._check_types(columns)
        path, first = self._path, 1
        with self._open() as file:
            for batch in _batches(path, file, columns):
                most = _rows_of_block(batch.nbytes, batch.num_rows)
                for begin in range(0, batch.num_rows, most):
                    part = batch.slice(begin, most)
                    values = {name: part.column(name) for name in columns}
                    yield RowBlock(values, path, range(first, first + part.num_rows), "row")
                    first += part.num_rows


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" or path.suffix.lower() == ".parquet"


def _batches(path: Path, file: Any, columns: Sequence[str]) -> Iterator[Any]:
    if _is_parquet(path):
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        most = min((_rows_of_block(group.total_byte_size, group.num_rows) for group in groups), default=_ROWS)
        return iter(file.iter_batches(batch_size=most, columns=list(columns), use_threads=False))
    return iter(file)


def _rows_of_block(size: int, rows: int) -> int:
    """Return how many of these rows make a block, by their average size in bytes."""
    return max(1, min(_ROWS, _BLOCK_BYTES * rows // max(1, size)))
