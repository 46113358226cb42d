"""Jobs that wait or run at a scheduler, in the order in which they came, and their ends.

A job waits for its turn while `max_running` others run, and then until it has its first workers. Filled by `server`
with submitted jobs and by `service` with the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from hypha_scheduler.errors import JobCancelledError, JobFailedError, JobInterruptedError, JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.runner import WAITS_AGAIN, JobRunner


@dataclass(slots=True, eq=False)
class ActiveJob:
    """A job that has not ended."""

    job_id: uuid.UUID
    job: JobTable
    directory: Path
    waits: bool = False
    """Whether it waits for its turn and its first workers without a limit."""
    submitted_at: float = 0.0
    """Seconds since the Unix epoch; 0 for a job that was not submitted."""
    runner: JobRunner | None = None
    is_started: bool = False
    """Whether it has had its turn."""
    is_placed: bool = False
    """Whether it has its first workers."""
    is_cancelled: bool = False
    outcome: Mapping[str, str] = field(default_factory=dict)
    """How it has ended: ``result``, ``error`` or ``interrupted``, as clients are told."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    changed: anyio.Event = field(default_factory=anyio.Event)
    """Replaced each time the job's turn may have come."""

    def wake(self) -> None:
        """Let the job look at whether its turn has come."""
        self.changed.set()
        self.changed = anyio.Event()

    def cancel(self) -> None:
        """End the job for its owner, also while it waits."""
        self.is_cancelled = True
        if self.runner is not None:
            self.runner.cancel()
        self.wake()


class ActiveJobs:
    """All jobs that have not ended."""

    def __init__(self, max_running: int | None = None, max_waiting: int = 100) -> None:
        """Let at most `max_running` jobs run, and so many submitted ones wait."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._jobs: dict[uuid.UUID, ActiveJob] = {}
        self._is_stopping = False

    def __iter__(self) -> Iterator[ActiveJob]:
        return iter(tuple(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: uuid.UUID) -> ActiveJob | None:
        """Return a job that has not ended."""
        return self._jobs.get(job_id)

    def check_room(self, *, waits: bool) -> None:
        """Check whether another job may be added.

        Raises:
            JobRefusedError: too many jobs wait, or the job would have to wait and may not.
        """
        if not waits and self._max_running is not None and self._count_started() >= self._max_running:
            raise JobRefusedError(
                f"scheduler.queue.max_running = {self._max_running}: so many jobs run already; submit the job without "
                "--no-wait, then it waits for its turn"
            )
        if waits and sum(job.waits and not job.is_placed for job in self) >= self._max_waiting:
            raise JobRefusedError(
                f"scheduler.queue.max_waiting = {self._max_waiting}: so many jobs wait already; submit the job again "
                "when one of them runs, or cancel one"
            )

    def add(self, job: ActiveJob) -> ActiveJob:
        """Add a job, after all that are there.

        Raises:
            JobFailedError: a job of this id waits or runs already.
        """
        if job.job_id in self._jobs:
            raise JobFailedError(f"job {job.job_id} runs already")
        self._jobs[job.job_id] = job
        return job

    async def run(self, job: ActiveJob, run: Callable[[], Awaitable[Path]]) -> Path:
        """Run a job that was added, when its turn has come; return what `run` does.

        Raises:
            JobFailedError: the job failed or was cancelled.
            JobInterruptedError: the scheduler is stopped.
        """
        try:
            await self._wait_for_turn(job)
            result = await run()
            job.outcome = {"result": str(result)}
            return result
        except JobFailedError as error:
            job.outcome = {"error": str(error)}
            raise
        except JobInterruptedError as error:
            job.outcome = {"interrupted": str(error)}
            raise
        finally:
            del self._jobs[job.job_id]
            job.outcome = job.outcome or {"interrupted": "the scheduler was stopped"}
            job.ended.set()
            self._wake_waiting()

    async def _wait_for_turn(self, job: ActiveJob) -> None:
        while not self._has_turn(job):
            if job.is_cancelled:
                raise JobCancelledError("its owner cancelled it while it waited")
            if self._is_stopping:
                raise JobInterruptedError(WAITS_AGAIN)
            await job.changed.wait()
        job.is_started = True
        self._wake_waiting()  # the next may have its turn, too

    def _has_turn(self, job: ActiveJob) -> bool:
        if not job.waits:
            return True
        if self._is_stopping or job.is_cancelled or next(self._not_started()) is not job:
            return False
        return self._max_running is None or self._count_started() < self._max_running

    def _not_started(self) -> Iterator[ActiveJob]:
        return (job for job in self if not job.is_started)

    def _count_started(self) -> int:
        return sum(job.is_started for job in self)

    def _wake_waiting(self) -> None:
        for job in self._not_started():
            job.wake()

    def stop(self) -> None:
        """Start none of the jobs that wait for their turn; `run` raises `JobInterruptedError` for them."""
        self._is_stopping = True
        self._wake_waiting()

    def waits_because(self, job: ActiveJob) -> str | None:
        """Return why a job waits; None if it runs."""
        if job.is_started:
            return None if job.runner is None else job.runner.waits_because
        ahead = next(place for place, other in enumerate(self._not_started()) if other is job)
        text = f"{self._count_started()} jobs run, as many as scheduler.queue.max_running allows"
        return text if not ahead else f"{text}, and {ahead} wait before it"
