"""Yamux frames and what `yamux.session` and `yamux.stream` share: header, types, flags, window sizes.

The frame layout is that of https://github.com/hashicorp/yamux/blob/master/spec.md: a header of twelve bytes (version,
type, flags, stream id, length), followed by `length` bytes of body in data frames alone.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final

SPEC_INITIAL_WINDOW: Final = 256 << 10
"""Receive window that the specification grants every stream at its start, in bytes."""
INITIAL_WINDOW: Final = 1 << 20
"""Receive window that this implementation grants a stream at first, in bytes; see `initial_receive_window`."""
MAX_WINDOW: Final = 4 << 20
"""Receive window to which a stream grows on a link with a long round trip or a high rate, in bytes."""
SMALL_BODY: Final = 4 << 10
"""Largest body, in bytes, that is sent with its header in one TLS record, ahead of queued large frames."""


class FrameType(IntEnum):
    """Type of a frame."""

    DATA = 0
    WINDOW = 1
    PING = 2
    GO_AWAY = 3


class FrameFlag(IntFlag):
    """Flags of a frame: open, acknowledge, half-close or reset its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


HEADER: Final = struct.Struct(">BBHII")
"""Version, type, flags, stream id, length; big-endian."""


def frame_header(kind: FrameType, flags: FrameFlag, stream_id: int, length: int) -> bytes:
    """Pack the header of a frame."""
    return HEADER.pack(0, kind, flags, stream_id, length)


def size_with_tls(size: int) -> int:
    """Return an upper bound for `size` bytes after TLS has encrypted them; valid from 16 KiB on."""
    return size + size // 256
