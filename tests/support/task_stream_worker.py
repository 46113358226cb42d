"""A worker's side of a task stream, as a test scripts it: what it hears, and what it reports."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from hypha_net.endpoint import Stream
from hypha_net.errors import NetError
from hypha_net.message_channel import ChannelError, MessageChannel, receive_frame, send_frame
from hypha_net.testing import MemoryEndpoint
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASKS
from hypha_proto.tasks import (
    MAX_FRAME,
    Ready,
    SchedulerFrame,
    Started,
    StatusUpdate,
    StoredOutput,
    Subscribe,
    Subscribed,
    TaskDefinition,
    TaskFinished,
    WorkerFrame,
)


class WorkerCodec:
    """Frames as a worker sends and receives them."""

    def encode(self, sequence: int, acknowledged: int, message: StatusUpdate | None) -> bytes:
        return to_cbor(WorkerFrame, WorkerFrame(sequence=sequence, acknowledged=acknowledged, report=message))

    def decode(self, data: bytes) -> tuple[int, int, TaskDefinition | None]:
        frame: SchedulerFrame = from_cbor(SchedulerFrame, data, MAX_FRAME)
        return frame.sequence, frame.acknowledged, frame.definition


async def subscribe(stream: Stream, message: Subscribe) -> Subscribed:
    """Send the first message of a stream and return its answer."""
    await send_frame(stream, to_cbor(Subscribe, message))
    data = await receive_frame(stream, MAX_FRAME)
    if data is None:
        raise ChannelError("the stream ended before the answer")
    answer: Subscribed = from_cbor(Subscribed, data)
    return answer


@dataclass
class TaskStreamWorker:
    """Stream of one lease, opened by `open` and again after `cut`."""

    endpoint: MemoryEndpoint
    scheduler: PeerId
    lease: uuid.UUID
    tasks: anyio.abc.TaskGroup
    auto: bool = False
    """Whether it confirms and finishes each attempt, with no outputs."""
    definitions: list[TaskDefinition] = field(default_factory=list)
    stream: Stream | None = None
    changed: anyio.Event = field(default_factory=anyio.Event)
    ended: int = 0
    """Number of streams that have ended."""

    def __post_init__(self) -> None:
        self.channel: MessageChannel[StatusUpdate, TaskDefinition] = MessageChannel(WorkerCodec(), self.hear, MAX_FRAME)

    async def open(self) -> Subscribed:
        """Open a stream and serve it in the background; return the scheduler's answer."""
        self.stream = await self.endpoint.open_stream(self.scheduler, [TASKS])
        answer = await subscribe(
            self.stream, Subscribe(lease=self.lease, next=self.channel.next_wanted, first=self.channel.oldest)
        )
        if answer.refused is None:
            self.tasks.start_soon(self._run, self.stream, answer.next)
        return answer

    async def _run(self, stream: Stream, wanted: int) -> None:
        try:
            await self.channel.run(stream, wanted)
        except NetError:
            await stream.reset()
        else:
            await stream.aclose()
        self.ended += 1
        self._note()

    async def cut(self) -> None:
        """Break the stream."""
        assert self.stream is not None
        await self.stream.reset()

    async def hear(self, definition: TaskDefinition) -> None:
        self.definitions.append(definition)
        self._note()
        if self.auto and definition.start is not None:
            self.report(definition, started=Started())
            self.report(definition, ready=Ready())
            self.report(definition, finished=TaskFinished(outputs=()))

    def _note(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, kind: str, count: int = 1) -> TaskDefinition:
        """Wait until `start`, `stop` or `drain` was heard `count` times; return the last of these definitions."""
        while len(heard := [entry for entry in self.definitions if getattr(entry, kind) is not None]) < count:
            await self.changed.wait()
        return heard[-1]

    async def until_ended(self, count: int = 1) -> None:
        """Wait until streams have ended."""
        while self.ended < count:
            await self.changed.wait()

    def report(self, definition: TaskDefinition, **what: Any) -> None:
        """Queue a report on the attempt of a definition."""
        self.channel.send(StatusUpdate(attempt=definition.attempt, **what))

    async def tell(self, definition: TaskDefinition, **what: Any) -> None:
        """Report, and wait until the scheduler has handled it."""
        self.report(definition, **what)
        await self.channel.wait_until_handled()

    async def finish(self, definition: TaskDefinition, *outputs: StoredOutput) -> None:
        """Report that an attempt has finished."""
        await self.tell(definition, finished=TaskFinished(outputs=outputs, bytes_sent=1, bytes_received=2))
