"""The scheduler's side of task streams, scripted: sends definitions, records reports, answers where resources are."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from hypha_net import rpc
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError
from hypha_net.message_channel import MessageChannel, receive_frame, send_frame
from hypha_net.testing import MemoryEndpoint
from hypha_proto.attempt_id import AttemptId
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.commands import Command, CommandAnswer, TaskCommand
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, RenewLease
from hypha_proto.protocols import TASKS
from hypha_proto.task_resources import LOCATE_RESOURCE, Gone, LocateResource, ResourceLocation
from hypha_proto.tasks import (
    MAX_FRAME,
    OutputPath,
    StatusUpdate,
    Subscribe,
    Subscribed,
    TaskCancelled,
    TaskDefinition,
    TaskFailed,
    TaskFinished,
    TaskSpec,
)
from support.fuzz_target import SchedulerCodec

RUN_CODE = "import json, os, sys, time; task = json.load(open('job.json')); exec(task['settings']['code'])"
PYTHON = {"class": "shell", "name": "python", "cmd": sys.executable, "args": ["-I", "-S", "-c", RUN_CODE]}
"""Configuration of an executor that runs the code in the task's settings."""
ENDS = ("finished", "failed", "cancelled")


def kind_of(report: StatusUpdate) -> str:
    """Return the name of the field that a report has."""
    names = ("started", "ready", "progress", "draining", "answered", *ENDS)
    return next(name for name in names if getattr(report, name) is not None)


async def _nothing(_peer: PeerId, _question: LocateResource) -> ResourceLocation:
    return ResourceLocation(gone=Gone("nothing is here"))


@dataclass
class ScriptedTaskScheduler:
    """Task streams of the leases of one job."""

    endpoint: MemoryEndpoint
    job_id: uuid.UUID = field(default_factory=uuid.uuid4)
    updates: list[StatusUpdate] = field(default_factory=list)
    subscriptions: list[Subscribe] = field(default_factory=list)
    questions: list[LocateResource] = field(default_factory=list)
    refuse: str | None = None
    clean_ends: int = 0
    """Streams that their workers have ended."""
    locate: Callable[[PeerId, LocateResource], Awaitable[ResourceLocation]] = _nothing
    on_update: Callable[[StatusUpdate], None] = lambda _update: None
    streams: dict[uuid.UUID, Stream] = field(default_factory=dict)
    _commands: int = 0
    _channels: dict[uuid.UUID, MessageChannel[TaskDefinition, StatusUpdate]] = field(default_factory=dict)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def listen(self) -> None:
        """Serve the streams and the questions of workers."""
        self.endpoint.handle(TASKS, self._serve)
        rpc.serve(self.endpoint, LOCATE_RESOURCE, self._locate)

    async def _locate(self, peer: PeerId, question: LocateResource) -> ResourceLocation:
        self.questions.append(question)
        self.notify()
        return await self.locate(peer, question)

    async def _serve(self, stream: Stream) -> None:
        data = await receive_frame(stream, MAX_FRAME)
        assert data is not None
        wanted: Subscribe = from_cbor(Subscribe, data)
        self.subscriptions.append(wanted)
        self.notify()
        channel = self.channel(wanted.lease)
        answer = Subscribed(job_id=self.job_id, next=channel.next_wanted, refused=self.refuse)
        await send_frame(stream, to_cbor(Subscribed, answer))
        if self.refuse is not None:
            return
        self.streams[wanted.lease] = stream
        try:
            await channel.run(stream, wanted.next)
            self.clean_ends += 1
            self.notify()
        except NetError:
            await stream.reset()

    def channel(self, lease: uuid.UUID) -> MessageChannel[TaskDefinition, StatusUpdate]:
        """Return the channel of a lease."""
        if lease not in self._channels:
            self._channels[lease] = MessageChannel(SchedulerCodec(), self._handle, MAX_FRAME)
        return self._channels[lease]

    async def _handle(self, update: StatusUpdate) -> None:
        self.updates.append(update)
        self.on_update(update)
        self.notify()

    def notify(self) -> None:
        """Let `until` look at its condition again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
        """Wait until `condition` holds; return its value."""
        with anyio.fail_after(seconds):
            while not (found := condition()):
                with anyio.move_on_after(0.1):
                    await self._changed.wait()
        return found

    async def keep(self, worker: PeerId, lease: uuid.UUID) -> None:
        """Renew a lease until cancelled."""
        while True:
            await anyio.sleep(2.0)
            await rpc.call(self.endpoint, worker, RENEW_LEASE, RenewLease(id=lease))

    def define(self, lease: uuid.UUID, task: str, attempt: int = 0, **fields: Any) -> None:
        """Send a definition."""
        self.channel(lease).send(TaskDefinition(attempt=self.name(task, attempt), **fields))

    def name(self, task: str, attempt: int = 0) -> AttemptId:
        """Return the name of an attempt."""
        return AttemptId(self.job_id, task, attempt)

    def start(
        self,
        lease: uuid.UUID,
        task: str,
        code: str = "",
        *,
        attempt: int = 0,
        outputs: dict[str, str] | None = None,
        settings: Any = None,
        **spec: Any,
    ) -> None:
        """Start a task that runs Python."""
        spec.setdefault("executor", "shell/python")
        paths = tuple(OutputPath(name, path) for name, path in (outputs or {}).items())
        text = json.dumps({"code": code, **(settings or {})})
        self.define(lease, task, attempt, start=TaskSpec(settings=text, outputs=paths, **spec))

    def of(self, task: str, attempt: int = 0) -> list[StatusUpdate]:
        """Return the status updates of an attempt."""
        return [report for report in self.updates if report.attempt == self.name(task, attempt)]

    def kinds(self, task: str, attempt: int = 0) -> list[str]:
        """Return the kinds of the status updates of an attempt."""
        return [kind_of(report) for report in self.of(task, attempt)]

    async def command(self, lease: uuid.UUID, task: str, command: Command, attempt: int = 0) -> CommandAnswer:
        """Send a command to an attempt; return the answer."""
        self._commands += 1
        number = self._commands
        self.define(lease, task, attempt, command=TaskCommand.of(number, command))

        def answer() -> CommandAnswer | None:
            answers = (report.answered for report in self.of(task, attempt))
            return next((found for found in answers if found is not None and found.number == number), None)

        found: CommandAnswer = await self.until(answer)
        return found

    async def end(self, task: str, attempt: int = 0, seconds: float = 15.0) -> StatusUpdate:
        """Wait for the end of an attempt; return the status update of it."""

        def ended() -> StatusUpdate | None:
            return next((report for report in self.of(task, attempt) if kind_of(report) in ENDS), None)

        found: StatusUpdate = await self.until(ended, seconds)
        return found

    async def success(self, task: str, attempt: int = 0, seconds: float = 15.0) -> TaskFinished:
        """Wait for the end of an attempt that finishes."""
        report = await self.end(task, attempt, seconds)
        assert report.finished is not None, report
        return report.finished

    async def failure(self, task: str, attempt: int = 0) -> TaskFailed:
        """Wait for the end of an attempt that fails."""
        failed = (await self.end(task, attempt)).failed
        assert failed is not None
        return failed

    async def cancellation(self, task: str, attempt: int = 0) -> TaskCancelled:
        """Wait for the end of an attempt that is cancelled."""
        cancelled = (await self.end(task, attempt)).cancelled
        assert cancelled is not None
        return cancelled
