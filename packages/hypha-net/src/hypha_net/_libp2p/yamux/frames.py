"""Yamux frames and what `yamux.session` and `yamux.stream` share: header, types, flags, window sizes, `SessionHandle`.

The frame layout is that of https://github.com/hashicorp/yamux/blob/master/spec.md: a header of twelve bytes (version,
type, flags, stream id, length), followed by `length` bytes of body in data frames alone.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final, Protocol

from libp2p.peer.id import ID

from hypha_net._libp2p.yamux.receive_buffer import UnreadBytes

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


class SessionHandle(Protocol):
    """What a stream needs of the session that carries it; implemented by `yamux.session.YamuxSession`."""

    @property
    def peer_id(self) -> ID:
        """The peer at the other end."""
        ...

    @property
    def unread(self) -> UnreadBytes:
        """Counter of received bytes that have not been read, shared by all streams and connections of the peer."""
        ...

    @property
    def is_relayed(self) -> bool:
        """Whether the connection runs through a relay."""
        ...

    @property
    def frame_size(self) -> int:
        """How many bytes of one stream are sent in one frame at present."""
        ...

    @property
    def initial_receive_window(self) -> int:
        """Receive window of a new stream."""
        ...

    def can_widen(self) -> bool:
        """Whether one more stream may have a window larger than `INITIAL_WINDOW`."""
        ...

    def is_fast_for(self, extra: int) -> bool:
        """Whether the link is so fast that widened windows may grow by `extra` bytes whatever the round trip."""
        ...

    def round_trip(self) -> float:
        """Return the link's round-trip time in seconds; 0 until it is known."""
        ...

    def remove_if_finished(self, stream_id: int) -> None:
        """Forget a stream if it is finished in both directions."""
        ...

    async def send_frame(
        self,
        kind: FrameType,
        flags: FrameFlag,
        stream_id: int,
        length: int,
        data: memoryview | None = None,
        before: bytes = b"",
    ) -> None:
        """Send one frame, whole. Raises `IOException` when the connection is gone."""
        ...

    def queue_frame(self, kind: FrameType, flags: FrameFlag, stream_id: int, length: int) -> None:
        """Have the writer task send a frame without a body."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port of the connection's other end, if known."""
        ...
