"""Pool of buffers for frame bodies and for blocks of transfers, which are reused: fresh memory costs more than its use.

A frame's body is decrypted straight into such a buffer. `yamux.receive_buffer` releases it when it was read, or a
circuit relay that forwards the bytes without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_POOLED_BODY: Final = 1028 << 10
"""Size of the largest frame that this implementation sends, on a stream with a circuit."""
BLOCK: Final = 2 << 20
"""Size of a block of a transfer, and of the largest pooled buffer."""
_SIZES: Final = (*(MAX_POOLED_BODY >> halvings for halvings in (5, 4, 3, 2, 1, 0)), BLOCK)
"""Sizes of pooled buffers; a request is served from the smallest that fits, so at least half of a buffer is used."""
_MAX_FREE_BYTES: Final = MAX_POOLED_BODY * 4
"""Memory of free buffers that is kept of each size."""

_free: Final[dict[int, list[bytearray]]] = {size: [] for size in _SIZES}


def acquire_buffer(size: int) -> memoryview:
    """Return a writable buffer of `size` bytes with arbitrary content."""
    if _SIZES[0] // 2 < size <= BLOCK:
        pooled = next(each for each in _SIZES if size <= each)
        free = _free[pooled]
        return memoryview(free.pop() if free else bytearray(pooled))[:size]
    return memoryview(bytearray(size))


@contextmanager
def lent_buffer(size: int) -> Iterator[memoryview]:
    """Lend a writable buffer of `size` bytes with arbitrary content."""
    buffer = acquire_buffer(size)
    try:
        yield buffer
    finally:
        release_buffer(buffer)


def release_buffer(body: memoryview) -> None:
    """Return a buffer to the pool; it must not be used afterwards."""
    buffer = body.obj
    body.release()
    if not isinstance(buffer, bytearray):
        return
    free = _free.get(len(buffer))
    if free is not None and len(free) * len(buffer) < _MAX_FREE_BYTES:
        free.append(buffer)
