"""What a file is by its first bytes, to say so where another kind of file is expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

HEAD: Final = 512
"""First bytes of a file that are looked at."""
_TAR: Final = slice(257, 262)
_KINDS: Final[Mapping[bytes, tuple[str, str]]] = {
    b"version https://git-lfs": ("a Git LFS pointer", "run `git lfs pull` where it is from"),
    b"\x1f\x8b": ("compressed by gzip", "unpack it with gunzip"),
    b"(\xb5/\xfd": ("compressed by zstd", "unpack it with unzstd"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it with unxz"),
    b"BZh": ("compressed by bzip2", "unpack it with bunzip2"),
    b"PK\x03\x04": ("a zip archive, as PyTorch writes", "unpack it, or save its tensors with safetensors"),
    b"\x80\x02": ("a pickle", "save its values with safetensors; pickles are not loaded"),
    b"\x80\x03": ("a pickle", "save its values with safetensors; pickles are not loaded"),
    b"\x80\x04": ("a pickle", "save its values with safetensors; pickles are not loaded"),
    b"\x80\x05": ("a pickle", "save its values with safetensors; pickles are not loaded"),
    b"\x93NUMPY": ("a numpy array", "save it with safetensors.numpy.save_file"),
    b"\x89HDF": ("an HDF5 file", "save its arrays with safetensors.numpy.save_file"),
    b"SQLite format": ("an SQLite database", "export a table as CSV"),
    b"PAR1": ("a Parquet file", "name it *.parquet"),
    b"ARROW1": ("an Arrow file", "save it as Parquet"),
    b"GGUF": ("a GGUF model", "save the model with save_pretrained"),
    b"%PDF": ("a PDF", "extract its text into *.txt"),
    b"\x89PNG": ("an image", "put images into one folder a class, and name that folder"),
    b"\xff\xd8\xff": ("an image", "put images into one folder a class, and name that folder"),
    b"RIFF": ("sound or video", "save its samples with safetensors"),
    b"\xff\xfe": ("text in UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "save it as UTF-8"),
    b"<!doctype": ("an HTML page, as a login or an error shows", "fetch the file again"),
    b"<html": ("an HTML page, as a login or an error shows", "fetch the file again"),
    b"[": ("a JSON array", "write one object a line, as `jq -c .[]` does, and name it *.jsonl"),
    b'{"': ("JSON", "name rows of one object a line *.jsonl"),
}
"""First bytes -> what it is, and how to get what is expected."""


def name_kind(head: bytes, expected: Collection[bytes] = ()) -> str | None:
    """Return what a file is and what to do, as ``it is a pickle: save …``; None if that is not known.

    Args:
        head: its first bytes, `HEAD` or all.
        expected: keys of `_KINDS` that are as they should be.
    """
    if not head:
        return "it is empty: fetch or write it again"
    if head[_TAR] == b"ustar":
        return "it is a tar archive: unpack it"
    start = head.lstrip()[:32].lower() if head[:1].isspace() or head[:1] == b"<" else head
    for prefix, (kind, remedy) in _KINDS.items():
        if start.startswith(prefix) and prefix not in expected:
            return f"it is {kind}: {remedy}"
    return None
