"""Simulated reports in the background: messages with several batches, which get lost, are doubled and come late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from hypha_proto.batch_reports import MAX_BATCHES, BatchesCounted, ReportBatches
from hypha_proto.progress import TrainedBatch
from support.diloco_scheduler import NotRunning, SchedulerDied
from support.diloco_simulation import JOB_ID

if TYPE_CHECKING:
    from support.diloco_processes import Training

AHEAD = 8
"""Batches that are trained and not counted while the end of the round is not known."""
TIMEOUT = 1.0
"""Seconds after which a worker waits no longer for an answer."""
SILENCE = 10.0
"""Seconds for which a silent scheduler is waited for at the end of a round, or where that is not known."""
LATEST = 3.0
"""Seconds by which a doubled message is late."""


@dataclass(eq=False)
class BackgroundReports:
    """The reports of one round, as the executor and its worker send them."""

    training: Training
    number: int
    kept: list[TrainedBatch] = field(default_factory=list)
    """Batches that are not counted."""
    first: int = 0
    last: int | None = None
    is_done: bool = False
    silent_since: float | None = None
    refusal: str = ""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def trained(self) -> int:
        return self.first + len(self.kept)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be trained in the round, as far as is known."""
        return self.is_done or (self.last is not None and self.trained >= self.last)

    async def ends(self) -> bool:
        """Return whether nothing more is to be trained in the round. Raises `NotRunning`."""
        if self.is_over and not self.is_done:
            await self.confirm_end()
        return self.is_over

    async def add(self, batch: TrainedBatch) -> None:
        """Hand a batch over; wait if too many are unanswered.

        Raises:
            NotRunning: the scheduler has refused a report.
        """
        self.kept.append(batch)
        self._change()
        while len(self.kept) > AHEAD and self.last is None and not (self.is_done or self.is_silent_for(SILENCE)):
            await self._wait()

    def is_silent_for(self, seconds: float) -> bool:
        """Return whether the scheduler has been silent for so long."""
        return self.silent_since is not None and anyio.current_time() - self.silent_since >= seconds

    async def confirm_end(self) -> None:
        """Wait until the report of the last batch is answered, which may allocate more. Raises `NotRunning`."""
        self.training.network.seen["ends confirmed"] += 1
        with anyio.move_on_after(SILENCE):
            while self.kept and not self.is_done:
                await self._wait()

    async def _wait(self) -> None:
        if self.refusal:
            raise NotRunning
        await self.changed.wait()

    def _change(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def run(self) -> None:
        """Send what gathers, one message at a time."""
        with self.scope:
            while not self.refusal:
                while not self.kept:
                    await self.changed.wait()
                while self.training.resumed is not None:
                    await self.training.resumed.wait()
                task, batches = self.training.task, tuple(self.kept[:MAX_BATCHES])
                message = ReportBatches(
                    attempt=task.id_in(JOB_ID),
                    round=self.number,
                    first=self.first,
                    batches=batches,
                    last=self.last,
                )
                self._apply(message, await self._send(message))
                self._change()
                await anyio.sleep(0.0 if self.silent_since is None else 0.25)

    def _apply(self, message: ReportBatches, answer: BatchesCounted | None) -> None:
        if answer is None:
            self.silent_since = anyio.current_time() if self.silent_since is None else self.silent_since
            return
        self.silent_since = None
        counted = max(self.first, min(answer.counted, self.trained))
        del self.kept[: counted - self.first]
        self.first, self.refusal = counted, answer.reason
        self.last = self.last if answer.last is None else answer.last
        self.is_done |= answer.done is True

    async def _send(self, message: ReportBatches) -> BatchesCounted | None:
        """Send a message; return the answer, None if none comes."""
        network = self.training.network
        probability = network.message_faults or 0.0
        if network.happens("batches lost", probability):
            await anyio.sleep(TIMEOUT)
            return None
        if network.happens("batches doubled", probability):
            network.tasks.start_soon(self._deliver_late, message)
        await network.delay("message")
        answer = self._deliver(message)
        await network.delay("message")
        if network.happens("answer to batches lost", probability):
            await anyio.sleep(TIMEOUT)
            return None
        return answer

    async def _deliver_late(self, message: ReportBatches) -> None:
        await anyio.sleep(self.training.network.random.uniform(0.0, LATEST))
        self._deliver(message)

    def _deliver(self, message: ReportBatches) -> BatchesCounted | None:
        """Let a message reach the scheduler; None if there is none that runs the task."""
        scheduler, task = self.training.network.scheduler, self.training.task
        if scheduler is None or not self.training.node.is_connected or scheduler.task_on(task.lease.id) != task:
            return None
        try:
            answer: BatchesCounted = scheduler.ask(
                lambda: scheduler.operator.on_message(task, "ReportBatches", message, scheduler.now)
            )
        except SchedulerDied:
            return None
        return answer

    def check(self) -> None:
        """Note a fault unless the scheduler has counted each batch once, and all of which it has said so."""
        network, peer = self.training.network, self.training.peer
        scheduler = network.scheduler
        running = None if scheduler is None else scheduler.operator._running
        if running is None or running.training.rounds.round_of(peer) != self.number:
            return
        counted = running.training.rounds.progress_of(peer, self.number)[1]
        network.seen["reports checked"] += 1
        if not self.first <= counted <= self.trained and not network.died:
            network.faults.append(f"round {self.number}: {counted} of {self.trained} batches of {peer} are counted")
