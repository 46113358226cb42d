"""One yamux stream: its receive buffer, flow control in both directions, half-close and reset.

Made by `yamux.session.YamuxSession`. Read and written by
`streams.stream.Libp2pStream`, and by py-libp2p for its own protocols.

Specification: https://github.com/hashicorp/yamux/blob/master/spec.md
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import IMuxedStream
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from hypha_net._libp2p.yamux.frames import (
    INITIAL_WINDOW,
    MAX_WINDOW,
    SMALL_BODY,
    SPEC_INITIAL_WINDOW,
    FrameFlag,
    FrameType,
    frame_header,
    size_with_tls,
)
from hypha_net._libp2p.yamux.receive_buffer import ReceiveBuffer

if TYPE_CHECKING:
    from hypha_net._libp2p.yamux.session import YamuxSession

SHORT_ROUND_TRIP: Final = 0.004
"""Round trip in seconds up to which `INITIAL_WINDOW` is large enough for full throughput."""
DISCARD_TIMEOUT: Final = 30.0
"""Seconds within which a peer must end a stream that is not read any more."""
WINDOW_UPDATE_INTERVAL: Final = 1.0
"""Seconds after which a slow reader grants even a small amount, so that the writer sees progress."""


class YamuxStream(IMuxedStream):
    """A stream. Bytes received before a clean end can still be read after it; a reset discards them."""

    def __init__(self, session: YamuxSession, stream_id: int, pending_flags: FrameFlag) -> None:
        """Make a stream whose first frame carries `pending_flags` (SYN or ACK) and our initial receive window."""
        self.muxed_conn = session
        self.stream_id = stream_id
        self._session = session
        self._pending_flags = pending_flags
        self._buffer = ReceiveBuffer()
        self._inplace_target: memoryview | None = None
        """Buffer of a waiting reader; a frame that fits is decrypted straight into it."""
        self._inplace_received = 0
        """Bytes of a complete frame in the reader's buffer."""
        self._inplace_partial = 0
        """Bytes of an incomplete frame in the reader's buffer; the session takes them back if the reader leaves."""
        self._spilled = b""
        """Those bytes, after the reader has left."""
        self.receive_window = session.initial_receive_window
        """Bytes that the peer may send before this side reads."""
        self._initial_grant = self.receive_window - SPEC_INITIAL_WINDOW
        self._receive_allowance = self.receive_window
        """Bytes that the peer may still send."""
        self._read_since_update = 0
        self._updated_at = trio.current_time()
        self._send_window = SPEC_INITIAL_WINDOW
        """Bytes that this side may still send."""
        self._local_closed = False
        """Whether this side has sent FIN."""
        self._remote_closed = False
        """Whether the peer has sent FIN."""
        self._reset_reason: str | None = None
        self._discarding = False
        self._discarding_since = 0.0
        self._small_writes = 0
        self._carries_circuit = False
        self._changed = trio.Event()

    @property
    def peer_id(self) -> ID:
        """The peer at the other end."""
        return self._session.peer_id

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def readable(self) -> int:
        """Number of bytes that can be read without waiting."""
        return self._buffer.size

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to `n` bytes.

        Raises:
            MuxedStreamEOF: the peer has closed its sending side.
            MuxedStreamReset: the stream was reset, or the connection broke.
        """
        await self._wait_for_bytes()
        data = self._buffer.take(self._buffer.size if n is None or n <= 0 else n)
        self._count_read(len(data))
        return data

    async def read_part(self) -> memoryview:
        """Return the first buffered part without a copy; the caller passes it to `buffer_pool.release_buffer`.

        Raises as `read`.
        """
        await self._wait_for_bytes()
        part = self._buffer.take_part()
        self._count_read(len(part))
        return part

    async def read_into(self, buffer: memoryview) -> int:
        """Read at least one byte into `buffer` and return how many. Raises as `read`."""
        if not self._buffer.size and self._inplace_target is None:
            size = await self._read_inplace(buffer)
            if size:
                return size
        await self._wait_for_bytes()
        size = self._buffer.take_into(buffer)
        self._count_read(size)
        return size

    async def _read_inplace(self, buffer: memoryview) -> int:
        """Offer `buffer` to the session and wait; return how many bytes it has put there, 0 if it used the queue."""
        self._inplace_target = buffer
        try:
            while not (self._inplace_received or self._buffer.size or self._remote_closed or self._reset_reason):
                await self._changed.wait()
        except BaseException:
            self._buffer.prepend(bytes(buffer[: self._inplace_received]))
            self._inplace_received = 0
            raise
        finally:
            if self._inplace_partial:  # kept until the session takes it; a later reader must not overwrite it
                self._spilled = bytes(buffer[: self._inplace_partial])
            size = self._inplace_received
            self._inplace_target, self._inplace_received, self._inplace_partial = None, 0, 0
        self._count_read(size)
        return size

    def can_receive_inplace(self, length: int) -> bool:
        """Return whether a frame of `length` bytes can be decrypted straight into a waiting reader's buffer."""
        target = self._inplace_target
        space = 0 if target is None or self._buffer.size or self._inplace_received else len(target)
        return length <= min(space, self._receive_allowance) and not self._remote_closed and not self._discarding

    def inplace_target(self, at: int, length: int) -> memoryview | None:
        """Return where to put the rest of a frame of `length` bytes, of which `at` are in the reader's buffer.

        None when that reader has left: then `take_spilled` returns the first `at` bytes.
        """
        if self._inplace_target is None or self._spilled or len(self._inplace_target) < length:
            return None
        self._inplace_partial = at
        return self._inplace_target[at:length]

    def commit_inplace(self, length: int) -> None:
        """Hand a complete frame in the reader's buffer to the reader."""
        self._inplace_partial, self._inplace_received = 0, length
        self._receive_allowance -= length
        self._session.unread.add(length)
        self._notify()

    def take_spilled(self) -> bytes:
        """Return the bytes of an incomplete frame that were in a reader's buffer when it left."""
        spilled, self._spilled = self._spilled, b""
        return spilled

    async def _wait_for_bytes(self) -> None:
        # cancellation is checked here and nowhere after bytes are taken, so that none are lost. With bytes at hand
        # there is no full checkpoint: only the session's own turn brings more, and small messages take many small reads
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._buffer.size:
            if self._remote_closed:
                raise MuxedStreamEOF("the peer has ended the stream")
            if self._reset_reason is not None:
                raise MuxedStreamReset(self._reset_reason)
            await self._changed.wait()

    def _count_read(self, size: int) -> None:
        self._session.unread.remove(size)
        self._update_window(size)

    def _update_window(self, size: int) -> None:
        """Grant the peer as much as was read, in portions of half a window.

        The window doubles only when half of it was used within 1.5 round trips, or the connection is fast. A larger
        window on a short, slow link would only fill buffers on the way, behind which requests wait.
        """
        self._read_since_update += size
        if self._remote_closed or self._reset_reason is not None or not self._read_since_update:
            return
        now = trio.current_time()
        half_used, elapsed = self._read_since_update >= self.receive_window // 2, now - self._updated_at
        if not half_used and elapsed < WINDOW_UPDATE_INTERVAL:
            return
        amount, self._read_since_update, self._updated_at = self._read_since_update, 0, now
        if half_used and self._should_widen(elapsed):
            amount += self.receive_window
            self.receive_window *= 2
        self.grant_window(amount)

    def _should_widen(self, elapsed: float) -> bool:
        if self.receive_window >= MAX_WINDOW or not (self.is_wide or self._session.can_widen()):
            return False
        more = self.receive_window * (1 if self.is_wide else 2)  # what it adds to the session's wide windows
        return elapsed < 1.5 * self._long_round_trip() or self._session.is_fast_for(more)

    def grant_window(self, amount: int) -> None:
        """Allow the peer to send `amount` more bytes, and send it a window update."""
        if amount:
            self._receive_allowance += amount
            self._session.queue_frame(FrameType.WINDOW, FrameFlag(0), self.stream_id, amount)

    def carry_circuit(self) -> None:
        """Prepare the stream for a relayed connection: widest window if the session allows it, frames with TLS."""
        self._carries_circuit = True
        if self._session.can_widen():
            amount, self.receive_window = MAX_WINDOW - self.receive_window, MAX_WINDOW
            self.grant_window(amount)

    @property
    def is_wide(self) -> bool:
        """Whether the receive window is larger than `INITIAL_WINDOW`."""
        return self.receive_window > INITIAL_WINDOW

    def _long_round_trip(self) -> float:
        """Return the link's round trip in seconds; 0 where `INITIAL_WINDOW` is large enough for it."""
        seconds = self._session.round_trip()
        return seconds if seconds > SHORT_ROUND_TRIP else 0.0

    def receive(self, data: memoryview) -> None:
        """Take the body of a data frame and ownership of its buffer.

        Raises:
            MuxedStreamError: the peer has ended the stream, or exceeds the receive window.
        """
        if self._remote_closed and data:
            raise MuxedStreamError(f"the peer sent {len(data)} bytes on stream {self.stream_id} after its end")
        if len(data) > self._receive_allowance:
            raise MuxedStreamError(
                f"the peer sent {len(data)} bytes on stream {self.stream_id} with {self._receive_allowance} allowed"
            )
        self._receive_allowance -= len(data)
        if self._discarding:
            self.grant_window(len(data))
        elif data:
            self._session.unread.add(len(data))
            self._buffer.append(data)
            self._notify()

    def receive_end(self) -> None:
        """Record that the peer has closed its sending side."""
        self._remote_closed = True
        self._notify()

    # ------------------------------------------------------------------------------------------------ writing

    async def write(self, data: bytes | bytearray | memoryview, *, end: bool = False) -> None:
        """Send all of `data`; wait as long as necessary for the peer's window updates. Do nothing without data.

        With `end` the frame of the last byte also closes the sending side.
        """
        rest = memoryview(data)
        while rest:
            await self._yield_before_frame(len(rest))  # not later: a frame that has begun is not cancelled
            if self._reset_reason is not None:
                raise MuxedStreamReset(self._reset_reason)
            if self._local_closed:
                raise MuxedStreamClosed("sending has ended on this side")
            if self._send_window == 0:
                await self._changed.wait()
                continue
            size = min(len(rest), self._send_window, self._max_frame_size())
            self._send_window -= size
            last = end and size == len(rest)
            self._local_closed = self._local_closed or last
            try:
                await self._send(FrameType.DATA, FrameFlag.FIN if last else FrameFlag(0), size, rest[:size])
            except trio.Cancelled:  # before the frame has begun: a frame is sent whole or not at all
                self._send_window += size
                self._local_closed = self._local_closed and not last
                raise
            rest = rest[size:]
        self._session.remove_if_finished(self.stream_id)

    def _max_frame_size(self) -> int:
        return size_with_tls(self._session.frame_size) if self._carries_circuit else self._session.frame_size

    async def _yield_before_frame(self, size: int) -> None:
        """Let other tasks run before each large frame and before every eighth small one.

        On a relayed connection the stream that carries the circuit already yields.
        """
        self._small_writes = self._small_writes + 1 if size < SMALL_BODY else 0
        if self._small_writes % 8 or (self._session.is_relayed and size >= SMALL_BODY):
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()

    async def _send(self, kind: FrameType, flags: FrameFlag, length: int, data: memoryview | None = None) -> None:
        pending, self._pending_flags = self._pending_flags, FrameFlag(0)
        before = frame_header(FrameType.WINDOW, pending, self.stream_id, self._initial_grant) if pending else b""
        try:
            await self._session.send_frame(kind, flags, self.stream_id, length, data, before)
        except trio.Cancelled:
            self._pending_flags = pending
            raise
        except IOException as error:
            raise MuxedStreamReset(f"the connection broke off: {error}") from error

    def add_send_window(self, amount: int) -> None:
        """Record that the peer accepts `amount` more bytes."""
        self._send_window = min(self._send_window + amount, 1 << 32)
        self._notify()

    async def send_syn(self) -> None:
        """Open or acknowledge the stream with a window update of its own, unless an earlier frame has done that."""
        pending, self._pending_flags = self._pending_flags, FrameFlag(0)
        if not pending:
            return
        try:
            await self._send(FrameType.WINDOW, pending, self._initial_grant)
        except trio.Cancelled:
            self._pending_flags = pending
            raise

    # ------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        """Close the sending side; reading goes on. Idempotent."""
        if self._local_closed or self._reset_reason is not None:
            return
        self._local_closed = True
        self._notify()
        await self._send_end()
        self._session.remove_if_finished(self.stream_id)

    async def discard(self) -> None:
        """Stop reading: drop what still arrives, and let the session reset the stream after `DISCARD_TIMEOUT`."""
        if self._discarding:
            return
        self._discarding, self._discarding_since = True, trio.current_time()
        self._update_window(self._drop_buffer())

    async def reset(self) -> None:
        """Abort the stream and tell the peer."""
        if not self.is_finished:
            self.reset_now()
            await trio.lowlevel.checkpoint_if_cancelled()

    def reset_now(self) -> None:
        """Do the same as `reset` without a checkpoint."""
        if self.is_finished:
            return
        self.abort("this side reset the stream")
        if FrameFlag.SYN not in self._pending_flags:  # otherwise the peer does not know the stream
            # queued, so that nothing waits for a peer that does not read
            self._session.queue_frame(FrameType.WINDOW, FrameFlag.RST, self.stream_id, 0)

    async def _send_end(self) -> None:
        """Send FIN; on cancellation leave that to the writer task."""
        try:
            await self._send(FrameType.WINDOW, FrameFlag.FIN, 0)
        except trio.Cancelled:
            self._session.queue_frame(FrameType.WINDOW, FrameFlag.FIN, self.stream_id, 0)
            raise

    def is_discard_overdue(self, now: float) -> bool:
        """Return whether the peer has not ended a stream `DISCARD_TIMEOUT` seconds after reading stopped."""
        return self._discarding and now - self._discarding_since > DISCARD_TIMEOUT

    def abort(self, reason: str) -> None:
        """Drop buffered bytes and fail every read and write with `reason`."""
        self._remote_closed = False
        self._drop_buffer()
        self._fail(reason)

    def connection_lost(self, reason: str) -> None:
        """End the stream with its connection; if the peer had closed its side, buffered bytes can still be read."""
        if self._remote_closed:
            self._fail(reason)
        else:
            self.abort(reason)

    def _fail(self, reason: str) -> None:
        self._reset_reason = self._reset_reason or reason
        self._notify()
        self._session.remove_if_finished(self.stream_id)

    def _drop_buffer(self) -> int:
        size = self._buffer.clear()
        self._session.unread.remove(size)
        return size

    @property
    def is_finished(self) -> bool:
        """Whether no more bytes pass in either direction."""
        return self._reset_reason is not None or (self._local_closed and self._remote_closed)

    @property
    def is_unused(self) -> bool:
        """Whether this side has no more use for the stream: it is finished, or this side neither sends nor reads."""
        return self.is_finished or (self._local_closed and self._discarding)

    def is_closed(self) -> bool:
        """Return `is_finished`; the name that py-libp2p calls."""
        return self.is_finished

    def set_deadline(self, ttl: int) -> None:
        """Fail: only py-libp2p's mplex uses this part of its interface, and Hypha uses cancel scopes."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port of the connection's other end, if known."""
        return self._session.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.close() if error is None else self.reset())
