"""Recognises errors that say that memory is exhausted: of Python, of numpy, and of torch on any device."""

from __future__ import annotations

import errno
from typing import Final

_WORDS: Final = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(words in str(error).lower() for words in _WORDS)
