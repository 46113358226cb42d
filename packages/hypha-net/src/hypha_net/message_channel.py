"""Messages in both directions between two peers, each delivered once and in order, over streams that may break.

Both sides number their messages and keep them until the other side has handled them. When a stream breaks, the next one
continues where it stopped: each side first states which message it wants next. Each frame follows its length (u32,
little endian); each protocol defines its own frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import anyio

from hypha_net.endpoint import Stream, receive_up_to
from hypha_net.errors import RequestError, first_leaf_error
from hypha_proto.errors import DecodeError

MAX_PENDING: Final = 1000
"""Messages that may wait for their acknowledgement."""
ACKNOWLEDGEMENT_DELAY: Final = 0.05
"""Seconds for which an acknowledgement waits for a message that carries it."""

Out = TypeVar("Out")
In = TypeVar("In")
OutC = TypeVar("OutC", contravariant=True)
InC = TypeVar("InC", covariant=True)


class ChannelError(RequestError):
    """The peer has broken the rules of the channel, or does not acknowledge what it gets."""


class FrameCodec(Protocol[OutC, InC]):
    """Frames of one side: a sequence number, an acknowledgement and perhaps a message."""

    def encode(self, sequence: int, acknowledged: int, message: OutC | None) -> bytes:
        """Encode a frame that is sent."""
        ...

    def decode(self, data: bytes) -> tuple[int, int, InC | None]:
        """Decode a frame that was received.

        Raises:
            DecodeError: it is malformed.
        """
        ...


async def send_frame(stream: Stream, data: bytes) -> None:
    """Send the length of some bytes, then the bytes."""
    await stream.send_all(len(data).to_bytes(4, "little") + data)


async def receive_frame(stream: Stream, limit: int) -> bytes | None:
    """Receive a length, then so many bytes; None if the stream ends before the length.

    Raises:
        ChannelError: the length is over `limit`, or the stream ends within the frame.
        StreamResetError: the stream broke.
    """
    header = await receive_up_to(stream, 4)
    if not header:
        return None
    length = int.from_bytes(header, "little")
    if length > limit:
        raise ChannelError(f"a frame of {length} bytes from {stream.peer} is over the limit of {limit}")
    data = await receive_up_to(stream, length)
    if len(header) < 4 or len(data) < length:
        raise ChannelError(f"the stream of {stream.peer} ended within a frame")
    return data


@dataclass(slots=True)
class MessageChannel(Generic[Out, In]):
    """One side of a channel."""

    codec: FrameCodec[Out, In]
    handle: Callable[[In], Awaitable[None]]
    """Handles a message of the peer, one at a time; it is acknowledged when this returns."""
    max_frame: int
    """Largest frame in bytes that is received."""
    next_wanted: int = 0
    """Sequence number of the first message of the peer that is not handled."""
    oldest: int = 0
    """Sequence number of the oldest own message that the peer has not handled; of the next one without any."""
    _pending: deque[Out] = field(default_factory=deque)
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope | None = None
    """Scope of the exchange over the current stream."""
    _stream: Stream | None = None
    """The newest stream."""
    _exchanging: anyio.Lock = field(default_factory=anyio.Lock)
    _acknowledged: anyio.Event = field(default_factory=anyio.Event)

    @property
    def pending(self) -> int:
        """Number of own messages that the peer has not handled."""
        return len(self._pending)

    def take_over(self, own: int, peers: int) -> None:
        """Continue, before the first stream, a channel whose state on this side is lost.

        Args:
            own: sequence number of the first own message that the peer has not handled.
            peers: sequence number of the oldest message that the peer keeps.
        """
        self.oldest, self.next_wanted = own, peers

    @property
    def _end(self) -> int:
        """Sequence number of the next own message."""
        return self.oldest + len(self._pending)

    def send(self, message: Out) -> None:
        """Queue a message; it is sent now or over the next stream.

        Raises:
            ChannelError: `MAX_PENDING` messages wait already.
        """
        if len(self._pending) >= MAX_PENDING:
            raise ChannelError(f"{MAX_PENDING} messages wait for their acknowledgement")
        self._pending.append(message)
        self._wake()

    def give_up(self) -> None:
        """Forget the messages that the peer has not handled, because nobody needs them any more."""
        self.oldest += len(self._pending)
        self._pending.clear()
        self._acknowledged.set()

    async def wait_until_handled(self) -> None:
        """Wait until the peer has handled all messages that were sent so far, or they are given up."""
        end = self._end
        while self.oldest < end:
            await self._acknowledged.wait()

    async def run(self, stream: Stream, peer_wants: int) -> None:
        """Exchange messages over a stream until the peer ends it; an exchange over an earlier stream ends.

        It begins when the last message of the earlier stream is handled, so that none is handled twice.

        Args:
            stream: a stream on which both sides have said which message they want next.
            peer_wants: sequence number of the first own message that the peer has not handled.

        Raises:
            ChannelError: the peer breaks the rules.
            StreamResetError: the stream broke.
        """
        self._stream = stream
        if self._scope is not None:
            self._scope.cancel()
        async with self._exchanging:
            if self._stream is stream:  # no newer one came while this one waited
                await self._run_exclusively(stream, peer_wants)

    async def _run_exclusively(self, stream: Stream, peer_wants: int) -> None:
        if peer_wants < self.oldest:
            raise ChannelError(f"{stream.peer} wants message {peer_wants} again, which it has handled")
        self._scope = anyio.CancelScope()
        try:
            with self._scope:
                await self._exchange(stream, peer_wants)
        except BaseExceptionGroup as errors:
            cancelled, _ = errors.split(anyio.get_cancelled_exc_class())
            if cancelled is not None:  # that the stream broke as well matters to nobody any more
                raise cancelled from None
            if isinstance(errors, ExceptionGroup):
                raise first_leaf_error(errors) from None
            raise
        finally:
            self._scope = None

    async def _exchange(self, stream: Stream, peer_wants: int) -> None:
        self._acknowledge(stream, peer_wants)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_pending, stream)
            await self._receive(stream)
            tasks.cancel_scope.cancel()

    async def _send_pending(self, stream: Stream) -> None:
        """Send messages, and separate acknowledgements where no message carries them; at least one frame at first."""
        position, told = self.oldest, -1
        while True:
            position = max(position, self.oldest)
            if position == self._end and told == self.next_wanted:
                await self._changed.wait()
                continue
            if told >= 0:
                with anyio.move_on_after(ACKNOWLEDGEMENT_DELAY):
                    while position == self._end:
                        await self._changed.wait()
            told = self.next_wanted
            message = self._pending[position - self.oldest] if position < self._end else None
            await send_frame(stream, self.codec.encode(position, told, message))
            position += message is not None

    async def _receive(self, stream: Stream) -> None:
        while (data := await receive_frame(stream, self.max_frame)) is not None:
            try:
                sequence, acknowledged, message = self.codec.decode(data)
            except DecodeError as error:
                raise ChannelError(f"malformed frame from {stream.peer}: {error}") from error
            self._acknowledge(stream, acknowledged)
            if message is None or sequence < self.next_wanted:
                continue  # an acknowledgement, or a repetition
            if sequence > self.next_wanted:
                raise ChannelError(f"{stream.peer} sent message {sequence}, and {self.next_wanted} is missing")
            with anyio.CancelScope(shield=True):  # a message is handled whole, and counted, or not begun
                await self.handle(message)
                self.next_wanted += 1
            self._wake()

    def _acknowledge(self, stream: Stream, wanted: int) -> None:
        if not 0 <= wanted <= self._end:
            raise ChannelError(f"{stream.peer} acknowledges message {wanted}, which was never sent")
        while self.oldest < wanted:
            self._pending.popleft()
            self.oldest += 1
        self._acknowledged.set()
        self._acknowledged = anyio.Event()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
