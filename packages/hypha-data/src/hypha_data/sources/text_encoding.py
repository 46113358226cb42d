"""Encodings of csv and text files: which can be read, and the lines of a file in them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from hypha_data.errors import DatasetError

MAX_LINE: Final = 4 << 20
"""Largest length of a line in bytes."""
_SAVE_AS_UTF8: Final = "save the file as UTF-8, or name its encoding by --encoding"


def check_encoding(name: str) -> str:
    """Return the usual name of an encoding.

    Raises:
        DatasetError: it is unknown, or lines do not end with the byte of a line feed.
    """
    try:
        found = codecs.lookup(name).name
        compatible = "a\n".encode(found) == b"a\n"
    except (LookupError, ValueError):
        raise DatasetError(
            f"--encoding {name}: unknown; use utf-8 or another one of Python's, such as latin-1"
        ) from None
    if not compatible:
        raise DatasetError(f"--encoding {name}: its line breaks are not single bytes; save the file as UTF-8")
    return found


def decode_lines(path: Path, file: BinaryIO, encoding: str, first: int = 1) -> Iterator[str]:
    """Yield the lines of a file from where it is read next, which is line `first`.

    Raises:
        DatasetError: a line is too long, or has another encoding.
    """
    number = first - 1
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise DatasetError(f"{path}, line {number}: longer than {MAX_LINE} bytes; divide the row")
        if number == 1:
            if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DatasetError(f"{path}, line 1: the file is UTF-16; save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            bad = f"byte 0x{error.object[error.start]:02x} at {error.start + 1}"
            raise DatasetError(f"{path}, line {number}: not {encoding}: {bad}; {_SAVE_AS_UTF8}") from None
