"""One yamux stream: its buffer, its credit in both directions, and how it ends. Made by `muxer.Muxer`."""

from __future__ import annotations

import logging
import struct
from enum import IntEnum, IntFlag
from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import IMuxedStream
from libp2p.io.exceptions import IOException
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from hypha_net._libp2p.yamux.receive_buffer import ReceiveBuffer

if TYPE_CHECKING:
    from hypha_net._libp2p.yamux.session import YamuxSession

_log = logging.getLogger("hypha_net.muxer")

INITIAL_WINDOW: Final = 256 << 10
"""What the specification grants every stream at its start."""
START_WINDOW: Final = 1 << 20
WINDOW: Final = 4 << 20
"""What we let a peer have under way on one stream: at first, and at most when it takes so much to fill a long link."""
SHORT_LINK: Final = 0.004
"""Seconds there and back in which the first window moves as much as anybody wants."""
SMALL: Final = 4 << 10
"""Bytes up to which a frame costs others no time worth mentioning."""
LINGER: Final = 30.0
"""Seconds within which a peer must end a stream that is not read any more."""
CREDIT_EVERY: Final = 1.0
"""Seconds after which a slow reader's credit goes back although it is little: the writer sees that it is read."""


class FrameType(IntEnum):
    """Kinds of frames."""

    DATA = 0
    WINDOW = 1
    PING = 2
    GO_AWAY = 3


class FrameFlag(IntFlag):
    """What a frame does to its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


HEADER: Final = struct.Struct(">BBHII")


def frame_header(kind: FrameType, flags: FrameFlag, stream_id: int, length: int) -> bytes:
    """The twelve bytes that a frame begins with."""
    return HEADER.pack(0, kind, flags, stream_id, length)


def with_tls(frame: int) -> int:
    """What a large frame of a circuit takes at most when TLS has encrypted it; frames of 16 KiB at least."""
    return frame + frame // 256


class YamuxStream(IMuxedStream):
    """One stream. Reading returns buffered bytes before an end; a reset discards them."""

    def __init__(self, muxer: YamuxSession, stream_id: int) -> None:
        self.muxed_conn = muxer
        self.muxer = muxer
        self.stream_id = stream_id
        self.pending_flags = FrameFlag(0)
        """SYN or ACK, until this side has sent its first frame, which tells the peer our window."""
        self._inflow = ReceiveBuffer()
        self._landing: memoryview | None = None
        """Where a reader waits for bytes; a frame that fits in is decrypted there."""
        self._landed = 0
        self._under_way = 0
        """Bytes there of a frame that has not come whole, which belong to the muxer."""
        self._rescued = b""
        self._unreturned = 0
        self._returned_at = trio.current_time()
        self._window = muxer.first_window
        self._first_credit = self._window - INITIAL_WINDOW
        self._credit = INITIAL_WINDOW
        self._room = self._window
        self._ended_here = False
        self._ended_there = False
        self._broken: str | None = None
        self._discarding = False
        self._discarding_since = 0.0
        self._small = 0
        self._deadline = float("inf")
        self._carries_circuit = False
        self._changed = trio.Event()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def readable(self) -> int:
        """Bytes that can be read without waiting."""
        return self._inflow.size

    async def read(self, n: int | None = None) -> bytes:
        """1 to `n` bytes; `MuxedStreamEOF` after the peer's clean end, `MuxedStreamReset` after any other."""
        await self._wait_for_bytes()
        data = self._inflow.take(self._inflow.size if n is None or n <= 0 else n)
        self._taken(len(data))
        return data

    async def read_part(self) -> memoryview:
        """What came together, without a copy; `inflow.give_back` takes the buffer back. Raises as `read`."""
        await self._wait_for_bytes()
        part = self._inflow.take_part()
        self._taken(len(part))
        return part

    async def read_into(self, buffer: memoryview) -> int:
        """At least one byte into `buffer`; how many. Raises as `read`."""
        if not self._inflow.size and self._landing is None:
            size = await self._wait_for_landing(buffer)
            if size:
                return size
        await self._wait_for_bytes()
        size = self._inflow.take_into(buffer)
        self._taken(size)
        return size

    async def _wait_for_landing(self, buffer: memoryview) -> int:
        """Wait until a frame lands in `buffer` or there is something else to read; how many bytes have landed."""
        self._landing = buffer
        try:
            while not (self._landed or self._inflow.size or self._ended_there or self._broken):
                await self._wait_for_change()
        except BaseException:
            self._inflow.put_back(bytes(buffer[: self._landed]))
            self._landed = 0
            raise
        finally:
            if self._under_way:  # what an earlier reader left stays until the muxer takes it
                self._rescued = bytes(buffer[: self._under_way])
            self._landing, size, self._landed, self._under_way = None, self._landed, 0, 0
        self._taken(size)
        return size

    def lands(self, length: int) -> bool:
        """Whether a frame of so many bytes can go straight to who waits for it."""
        room = 0 if self._landing is None or self._inflow.size or self._landed else len(self._landing)
        return length <= min(room, self._room) and not self._ended_there and not self._discarding

    def landing(self, at: int, length: int) -> memoryview | None:
        """Where the bytes of a frame from `at` on go, after those that are there; none when that reader is gone."""
        if self._landing is None or self._rescued or len(self._landing) < length:
            return None
        self._under_way = at
        return self._landing[at:length]

    def land(self, length: int) -> None:
        """A frame has come whole."""
        self._under_way, self._landed = 0, length
        self._room -= length
        self.muxer.unread.size += length
        self._notify()

    def rescued(self) -> bytes:
        """The bytes of a frame that had landed when the reader went away."""
        rescued, self._rescued = self._rescued, b""
        return rescued

    async def _wait_for_bytes(self) -> None:
        # here, and nowhere after bytes are taken: a cancellation must not lose them. Others need no turn when there are
        # bytes: no more will come until the muxer has had its own, and a small message is read in many small steps
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._inflow.size:
            if self._ended_there:
                raise MuxedStreamEOF("the peer has ended the stream")
            if self._broken is not None:
                raise MuxedStreamReset(self._broken)
            await self._wait_for_change()

    def _taken(self, size: int) -> None:
        self.muxer.unread.size -= size
        self._return_credit(size)

    def _return_credit(self, size: int) -> None:
        """Let the peer send as much again as was read, in portions of half a window.

        The window grows only when half of it was used up within little more than a round trip: what a short link has
        under way beyond that waits in some buffer, and requests wait behind it.
        """
        self._unreturned += size
        if self._ended_there or self._broken is not None or not self._unreturned:
            return
        now = trio.current_time()
        half, since = self._unreturned >= self._window // 2, now - self._returned_at
        if not half and since < CREDIT_EVERY:
            return
        amount, self._unreturned, self._returned_at = self._unreturned, 0, now
        longer = half and self._window < WINDOW and since < 1.5 * self._long_round_trip()
        if longer and (self.is_wide or self.muxer.may_widen()):
            amount += self._window
            self._window *= 2
        self.muxer.queue_credit(self, amount)

    def carry_circuit(self) -> None:
        """Let the peer have as much under way as on a long link, if few do, and take a circuit's frames whole."""
        self._carries_circuit = True
        if self.muxer.may_widen():
            amount, self._window = WINDOW - self._window, WINDOW
            self.muxer.queue_credit(self, amount)

    @property
    def is_wide(self) -> bool:
        """Whether its window has grown beyond what every stream has."""
        return self._window > START_WINDOW

    def _long_round_trip(self) -> float:
        """The link's round trip; 0 where it is so short that the first window is enough."""
        seconds = self.muxer.round_trip()
        return seconds if seconds > SHORT_LINK else 0.0

    def receive(self, data: memoryview) -> None:
        """Take bytes off the wire; their buffer belongs to the stream from now on.

        Raises:
            MuxedStreamError: they are more than this side allowed.
        """
        if self._ended_there and data:
            raise MuxedStreamError(f"the peer sent {len(data)} bytes on stream {self.stream_id} after its end")
        if len(data) > self._room:
            raise MuxedStreamError(
                f"the peer sent {len(data)} bytes on stream {self.stream_id} with {self._room} allowed"
            )
        self._room -= len(data)
        if self._discarding:
            self.muxer.queue_credit(self, len(data))
        elif data:
            self.muxer.unread.size += len(data)
            self._inflow.add(data)
            self._notify()

    def allow(self, amount: int) -> None:
        """Count credit that goes to the peer."""
        self._room += amount

    def end_there(self) -> None:
        """The peer sends no more."""
        self._ended_there = True
        self._notify()

    # ------------------------------------------------------------------------------------------------ writing

    async def write(self, data: bytes | bytearray | memoryview, *, end: bool = False) -> None:
        """Send all of `data`, waiting for the peer's credit as long as it takes.

        With `end` the frame of the last byte is also the end of the sending side. Does nothing without data.
        """
        rest = memoryview(data)
        while rest:
            await self._take_turns(len(rest))  # a frame that has begun is not cancelled
            if self._broken is not None:
                raise MuxedStreamReset(self._broken)
            if self._ended_here:
                raise MuxedStreamClosed("sending has ended on this side")
            if self._credit == 0:
                await self._wait_for_change()
                continue
            size = min(len(rest), self._credit, self._largest_frame())
            self._credit -= size
            last = end and size == len(rest)
            self._ended_here = self._ended_here or last
            try:
                await self._send(FrameType.DATA, FrameFlag.FIN if last else FrameFlag(0), size, rest[:size])
            except trio.Cancelled:  # before its turn: a frame is sent whole or not at all
                self._credit += size
                self._ended_here = self._ended_here and not last
                raise
            rest = rest[size:]
        self.muxer.forget_if_over(self)

    def _largest_frame(self) -> int:
        return with_tls(self.muxer.frame) if self._carries_circuit else self.muxer.frame

    async def _take_turns(self, size: int) -> None:
        """Let others have their turn before each large frame, and before one in a few small ones.

        In a circuit the stream that carries it does so already.
        """
        self._small = self._small + 1 if size < SMALL else 0
        if self._small % 8 or (self.muxer.relayed and size >= SMALL):
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()

    async def _send(self, kind: FrameType, flags: FrameFlag, length: int, data: memoryview | None = None) -> None:
        pending, self.pending_flags = self.pending_flags, FrameFlag(0)
        before = frame_header(FrameType.WINDOW, pending, self.stream_id, self._first_credit) if pending else b""
        try:
            await self.muxer.send_frame(kind, flags, self.stream_id, length, data, before)
        except trio.Cancelled:
            self.pending_flags = pending
            raise
        except IOException as error:
            raise MuxedStreamReset(f"the connection broke off: {error}") from error

    def add_credit(self, amount: int) -> None:
        """The peer takes `amount` bytes more."""
        self._credit = min(self._credit + amount, 1 << 32)
        self._notify()

    async def announce(self) -> None:
        """Open the stream on the wire, with our window, if no frame has done that."""
        pending, self.pending_flags = self.pending_flags, FrameFlag(0)
        if not pending:
            return
        try:
            await self._send(FrameType.WINDOW, pending, self._first_credit)
        except trio.Cancelled:
            self.pending_flags = pending
            raise

    # ------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        """End the sending side; reading goes on. Idempotent."""
        if self._ended_here or self._broken is not None:
            return
        self._ended_here = True
        self._notify()
        await self._send_end()
        self.muxer.forget_if_over(self)

    async def discard(self) -> None:
        """Read no more: what still comes is dropped, and the stream reset if it does not end in `LINGER` seconds."""
        if self._discarding:
            return
        self._discarding, self._discarding_since = True, trio.current_time()
        self._return_credit(self._drop_buffer())

    async def reset(self) -> None:
        """Break the stream off, and tell the peer."""
        if not self.over:
            self.reset_now()
            await trio.lowlevel.checkpoint_if_cancelled()

    def reset_now(self) -> None:
        """The same without a moment for others in between."""
        if self.over:
            return
        self.break_off("this side reset the stream")
        if FrameFlag.SYN not in self.pending_flags:  # else the peer has never heard of it
            self.muxer.queue_frame(
                FrameType.WINDOW, FrameFlag.RST, self.stream_id, 0
            )  # no wait for a peer that takes nothing

    async def _send_end(self) -> None:
        """Send FIN; a caller that is cancelled before its turn leaves that to the writer task."""
        try:
            await self._send(FrameType.WINDOW, FrameFlag.FIN, 0)
        except trio.Cancelled:
            self.muxer.queue_frame(FrameType.WINDOW, FrameFlag.FIN, self.stream_id, 0)
            raise

    def is_wasted(self, now: float) -> bool:
        """Whether the peer has not ended a stream that nobody reads any more."""
        return self._discarding and now - self._discarding_since > LINGER

    def break_off(self, reason: str) -> None:
        """Everything under way is lost."""
        self._ended_there = False
        self._drop_buffer()
        self._break(reason)

    def connection_lost(self, reason: str) -> None:
        """Nothing comes any more; what has come up to the peer's end of the stream can still be read."""
        if self._ended_there:
            self._break(reason)
        else:
            self.break_off(reason)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._notify()
        self.muxer.forget_if_over(self)

    def _drop_buffer(self) -> int:
        size = self._inflow.clear()
        self.muxer.unread.size -= size
        return size

    @property
    def over(self) -> bool:
        """Whether nothing will pass any more, in either direction."""
        return self._broken is not None or (self._ended_here and self._ended_there)

    def is_closed(self) -> bool:
        """See `over`; the name that py-libp2p asks for."""
        return self.over

    def set_deadline(self, ttl: int) -> None:
        """In `ttl` seconds a read or write that still waits for the peer fails with `MuxedStreamError`.

        Part of py-libp2p's interface; Hypha's deadlines are the caller's cancel scopes.

        Raises:
            ValueError: `ttl` is negative.
        """
        if ttl < 0:
            raise ValueError(f"a deadline in {ttl} s")
        self._deadline = trio.current_time() + ttl
        self._notify()

    async def _wait_for_change(self) -> None:
        if self._deadline == float("inf"):
            await self._changed.wait()
            return
        with trio.CancelScope(deadline=self._deadline) as scope:
            await self._changed.wait()
        if scope.cancelled_caught:
            raise MuxedStreamError("the stream's deadline has passed")

    def get_remote_address(self) -> tuple[str, int] | None:
        """Address of the connection's other end."""
        return self.muxer.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.close() if error is None else self.reset())
