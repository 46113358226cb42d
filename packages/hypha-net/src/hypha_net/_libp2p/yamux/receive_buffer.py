"""Receive buffer of one stream: bytes between the wire and their reader.

Large frame bodies stay in the pooled buffer into which they were decrypted and are copied once, to their reader. Small
ones are joined. Filled by `yamux.stream.YamuxStream`, which counts the bytes against the receive window.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from hypha_net.buffer_pool import release_buffer

_SMALL: Final = 16 << 10
"""Largest body that is joined with others, so that a peer that sends single bytes does not cost an object for each."""


class UnreadBytes:
    """Number of received bytes that have not been read, over all connections with one peer."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, count: int) -> None:
        """Count received bytes."""
        self.size += count

    def remove(self, count: int) -> None:
        """Count bytes that were read or discarded."""
        self.size -= count


class ReceiveBuffer:
    """Queue of bytes."""

    __slots__ = ("_offset", "_parts", "size")

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self._offset = 0
        """Bytes of the first part that have been read."""
        self.size = 0

    def append(self, body: memoryview) -> None:
        """Append a frame's body and take ownership of its buffer."""
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

    def prepend(self, data: bytes) -> None:
        """Put bytes before all others. May be called only while nothing has been read of the first part."""
        if data:
            self._parts.appendleft(bytearray(data))
            self.size += len(data)

    def take_into(self, target: memoryview) -> int:
        """Move as many bytes into `target` as are buffered and fit. Return how many."""
        taken = 0
        while taken < len(target) and self._parts:
            taken += self._take_from_first(target[taken:])
        self.size -= taken
        return taken

    def _take_from_first(self, target: memoryview) -> int:
        part = self._parts[0]
        count = min(len(target), len(part) - self._offset)
        with memoryview(part) as view:
            target[:count] = view[self._offset : self._offset + count]
        self._offset += count
        self._remove_first_if_read(part)
        return count

    def _remove_first_if_read(self, part: bytearray | memoryview) -> None:
        if self._offset == len(part):
            self._offset = 0
            self._parts.popleft()
            if isinstance(part, memoryview):
                release_buffer(part)

    def take(self, limit: int) -> bytes:
        """Return up to `limit` bytes of the first part; empty when nothing is buffered."""
        if not self._parts:
            return b""
        part = self._parts[0]
        with memoryview(part) as view:
            data = bytes(view[self._offset : self._offset + limit])
        self.size -= len(data)
        self._offset += len(data)
        self._remove_first_if_read(part)
        return data

    def take_part(self) -> memoryview:
        """Return the first part without a copy; the caller releases it with `buffer_pool.release_buffer`."""
        part, offset = self._parts.popleft(), self._offset
        self._offset = 0
        whole = memoryview(part)
        self.size -= len(whole) - offset
        return whole[offset:] if offset else whole

    def clear(self) -> int:
        """Discard everything. Return how many bytes that were."""
        discarded, self.size, self._offset = self.size, 0, 0
        self._parts.clear()
        return discarded
