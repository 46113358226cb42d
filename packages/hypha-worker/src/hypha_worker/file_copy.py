"""Digests of open files, and copies: by sharing blocks where the file system can (reflink); never a hard link.

The calls block, run in threads, and end when their caller is cancelled.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from typing import Any, Final

import anyio.from_thread

_BLOCK: Final = 1 << 20
_COPIED_AT_ONCE: Final = 64 << 20
_NO_COPY_RANGE: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


def copy_range(reader: int, writer: int, size: int) -> int:
    """Copy at most `size` bytes, all that there are unless the file becomes shorter; return how many."""
    copied = 0
    try:
        while count := os.copy_file_range(reader, writer, min(_COPIED_AT_ONCE, size - copied)):
            copied += count
            anyio.from_thread.check_cancelled()
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        while block := os.read(reader, min(_BLOCK, size - copied)):
            anyio.from_thread.check_cancelled()
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(writer, rest) :]
            copied += len(block)
    return copied


def hash_file(file: FileIO, hasher: Any) -> tuple[int, str]:
    """Return size and digest of an open file from its first byte; what it grows by meanwhile is left out."""
    block, size = memoryview(bytearray(_BLOCK)), 0
    left = os.fstat(file.fileno()).st_size
    file.seek(0)
    while count := file.readinto(block[: left - size]):
        anyio.from_thread.check_cancelled()
        hasher.update(block[:count])
        size += count
    return size, f"{hasher.name}:{hasher.hexdigest()}"
