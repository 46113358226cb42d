"""Kinds of files by their first bytes, for errors about files of another kind than expected."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from typing import Final

HEAD: Final = 512
"""Number of first bytes that are looked at."""
UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of UTF-16 and UTF-32."""
PARQUET: Final = b"PAR1"
PAGES: Final = (b"<!doctype", b"<html", b"<head", b"<!--", b"<?xml")
"""Starts of HTML and XML, in lower case."""
_CONTROL: Final = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_IMAGE: Final = ("an image", "put images into one folder a class, and name that folder")
_MEDIA: Final = ("sound or video", "save its samples with safetensors")
_PICKLE: Final = ("a pickle", "save its values with safetensors; pickles are not loaded")
_ARROW: Final = ("an Arrow file", "name the folder that save_to_disk has written, or save it as Parquet")
_INSIDE: Final = ((257, b"ustar", "a tar archive", "unpack it"), (8, b"WEBP", *_IMAGE), (4, b"ftyp", *_MEDIA))
"""Bytes at an offset, what the file is, and what to do."""
_BINARY: Final = (
    ((b"\x1f\x8b",), "compressed by gzip", "unpack it with gunzip"),
    ((b"(\xb5/\xfd",), "compressed by zstd", "unpack it with unzstd"),
    ((b"\xfd7zXZ",), "compressed by xz", "unpack it with unxz"),
    ((b"BZh",), "compressed by bzip2", "unpack it with bunzip2"),
    ((b'\x04"M\x18',), "compressed by lz4", "unpack it with unlz4"),
    ((b"7z\xbc\xaf",), "a 7z archive", "unpack it"),
    ((b"PK\x03\x04", b"PK\x05\x06"), "a zip archive, as PyTorch, numpy and Excel write", "unpack it, or save its "
     "tensors with safetensors and its tables as CSV"),
    ((*(b"\x80" + bytes([protocol]) for protocol in range(2, 6)), b"]q\0", b"}q\0"), *_PICKLE),
    ((b"\x93NUMPY",), "a numpy array", "save it with safetensors.numpy.save_file"),
    ((b"\x89HDF",), "an HDF5 file", "save its arrays with safetensors.numpy.save_file"),
    ((b"SQLite format",), "an SQLite database", "export a table as CSV"),
    ((b"\xd0\xcf\x11\xe0",), "an old Office file", "export its tables as CSV"),
    ((PARQUET,), "a Parquet file", "name it *.parquet"),
    ((b"ARROW1", b"\xff\xff\xff\xff"), *_ARROW),
    ((b"ORC", b"Obj\x01"), "an ORC or Avro file", "save it as Parquet"),
    ((b"GGUF",), "a GGUF model", "save the model with save_pretrained"),
    ((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*"), *_IMAGE),
    ((b"RIFF", b"ID3", b"fLaC", b"OggS"), *_MEDIA),
    (UTF_16, "text in UTF-16", "save it as UTF-8"),
)  # fmt: skip
"""Files that are not UTF-8 text: first bytes, what the file is, and what to do."""
_TEXT: Final = (
    ((b"version https://git-lfs",), "a Git LFS pointer", "run `git lfs pull` where it is from"),
    ((b"(lp0\n", b"(dp0\n"), *_PICKLE),
    (PAGES, "an HTML or XML page, as a login or an error shows", "fetch the file again"),
    ((b"[",), "a JSON array", "write one object a line, as `jq -c .[]` does, and name it *.jsonl"),
    ((b"{",), "JSON", "name rows of one object a line *.jsonl"),
)
"""The same for text, in lower case, after a byte order mark and white space."""


def name_kind(head: bytes, expected: Collection[bytes] = ()) -> str | None:
    """Return what a file is and what to do, as ``it is a pickle: save …``; None if that is not known.

    Args:
        head: its first bytes, `HEAD` or all.
        expected: first bytes that are as they should be, as the tables have them.
    """
    if not head:
        return "it is empty: fetch or write it again"
    if b"%PDF-" in head[:8]:
        return "it is a PDF: extract its text into *.txt"
    text = is_text(head)
    for offset, mark, kind, remedy in () if text else _INSIDE:
        if head.startswith(mark, offset):
            return f"it is {kind}: {remedy}"
    start = head.removeprefix(codecs.BOM_UTF8).lstrip().lower() if text else head
    for prefixes, kind, remedy in _TEXT if text else _BINARY:
        if any(start.startswith(prefix) and prefix not in expected for prefix in prefixes):
            return f"it is {kind}: {remedy}"
    return None


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text in UTF-8."""
    try:
        return _CONTROL.search(codecs.getincrementaldecoder("utf-8")().decode(head)) is None
    except UnicodeDecodeError:
        return False
