"""Bytes of csv, JSON lines and text files, also of compressed ones: ``.gz``, and ``.zst`` by pyarrow."""

from __future__ import annotations

import gzip
import io
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from hypha_data.errors import DatasetError
from hypha_data.sources.reader import import_extra
from hypha_proto.texts import quote

COMPRESSED: Final = (".gz", ".zst")
"""Suffixes of compressed files, beside that of the format."""
_BUFFER: Final = 1 << 20


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file's format, such as ``.csv`` of ``a.CSV.gz``, in lower case."""
    return Path(path.stem if is_compressed(path) else path.name).suffix.lower()


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed, by its name."""
    return path.suffix.lower() in COMPRESSED


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading from front to back, without its compression.

    Raises:
        DatasetError: it is damaged, or pyarrow is not installed.
        OSError: it cannot be read.
    """
    if not is_compressed(path):
        with path.open("rb") as file:
            yield file
        return
    try:
        with _decompress(path) as file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; both libraries raise others
            raise
        raise DatasetError(f"{path}: damaged: {quote(str(error))}; fetch or compress the file again") from None


def _decompress(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(path)), _BUFFER)
    arrow = import_extra("pyarrow", "reading .zst files")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd"), _BUFFER)


def unpack(path: Path, target: Path) -> Path:
    """Return a file without compression: `target`, which is written, or the file itself if it has none.

    Raises:
        DatasetError, OSError: as `open_plain`.
    """
    if not is_compressed(path):
        return path
    with open_plain(path) as file, target.open("wb") as plain:
        shutil.copyfileobj(file, plain, _BUFFER)
    return target
