"""Digests of files and directories; needs the extra `update`."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3


def digest_file(path: Path) -> str:
    """Return the digest of a file as ``blake3:<64 hex digits>``.

    Raises:
        OSError: it cannot be read.
    """
    return f"blake3:{blake3().update_mmap(path).hexdigest()}"


def digest_directory(folder: Path) -> str:
    """Return the digest of a directory: of one line ``NAME DIGEST`` for each file, in the order of names.

    NAME is the path inside the directory with ``/``. For the start model of a job.

    Raises:
        OSError: a file cannot be read.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = "".join(f"{name} {digest_file(folder / name)}\n" for name in names)
    return f"blake3:{blake3(lines.encode()).hexdigest()}"
