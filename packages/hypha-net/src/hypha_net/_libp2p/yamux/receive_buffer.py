"""Bytes of one stream between the wire and its reader: large frames as they came, small ones put together.

A frame's body is decrypted straight into the buffer in which it waits, and copied once, to where its reader wants it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, cast

MAX_BODY: Final = 257 << 10
"""Size of the largest frames that we send, a circuit's; larger ones are others'."""
_POOLED: Final = tuple(MAX_BODY >> halvings for halvings in (3, 2, 1, 0))
"""Sizes of the buffers that are used again and again: each holds more than half of its size."""
_SPARE: Final = 16
"""Buffers of each size that are kept while nobody needs them."""
_SMALL: Final = 16 << 10
"""Bodies up to here are joined: a peer that sends byte by byte must not cost an object for each."""

_spare: Final[dict[int, list[bytearray]]] = {size: [] for size in _POOLED}


def acquire_buffer(size: int) -> memoryview:
    """A writable buffer of `size` bytes; what is in it is arbitrary."""
    if _POOLED[0] // 2 < size <= MAX_BODY:
        pooled = next(each for each in _POOLED if size <= each)
        spare = _spare[pooled]
        return memoryview(spare.pop() if spare else bytearray(pooled))[:size]
    return memoryview(bytearray(size))


def release_buffer(body: memoryview) -> None:
    """Nobody needs the buffer any more; it must not be touched afterwards."""
    buffer = body.obj
    body.release()
    spare = _spare.get(len(buffer)) if isinstance(buffer, bytearray) else None
    if spare is not None and len(spare) < _SPARE:
        spare.append(cast(bytearray, buffer))


class Unread:
    """Bytes that have come from a peer and are not read yet, over all its connections."""

    def __init__(self) -> None:
        self.size = 0


class ReceiveBuffer:
    """A queue of bytes."""

    __slots__ = ("_offset", "_parts", "size")

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self._offset = 0
        """Bytes of the first part that have been taken."""
        self.size = 0

    def add(self, body: memoryview) -> None:
        """Append what came; the buffer belongs to the queue from now on."""
        self.size += len(body)
        if len(body) > _SMALL:
            self._parts.append(body)
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, bytearray) and len(last) < _SMALL:
            last += body
        else:
            self._parts.append(bytearray(body))
        release_buffer(body)

    def put_back(self, data: bytes) -> None:
        """Put bytes before what came; nothing of that has been taken."""
        if data:
            self._parts.appendleft(bytearray(data))
            self.size += len(data)

    def take_into(self, target: memoryview) -> int:
        """Move as many bytes into `target` as there are and fit; how many."""
        taken = 0
        while taken < len(target) and self._parts:
            taken += self._take_part(target[taken:])
        self.size -= taken
        return taken

    def _take_part(self, target: memoryview) -> int:
        part = self._parts[0]
        count = min(len(target), len(part) - self._offset)
        with memoryview(part) as there:
            target[:count] = there[self._offset : self._offset + count]
        self._offset += count
        self._drop_taken(part)
        return count

    def _drop_taken(self, part: bytearray | memoryview) -> None:
        if self._offset == len(part):
            self._offset = 0
            self._parts.popleft()
            if isinstance(part, memoryview):
                release_buffer(part)

    def take(self, limit: int) -> bytes:
        """Up to `limit` bytes, of what came together."""
        if not self._parts:
            return b""
        part = self._parts[0]
        with memoryview(part) as there:
            data = bytes(there[self._offset : self._offset + limit])
        self.size -= len(data)
        self._offset += len(data)
        self._drop_taken(part)
        return data

    def take_part(self) -> memoryview:
        """What came together, in the buffer that it came in; for `give_back` when nobody reads it any more."""
        part, offset = self._parts.popleft(), self._offset
        self._offset = 0
        whole = memoryview(part)
        self.size -= len(whole) - offset
        return whole[offset:] if offset else whole

    def clear(self) -> int:
        """Drop everything; how many bytes that were."""
        dropped, self.size, self._offset = self.size, 0, 0
        self._parts.clear()
        return dropped
