"""The running job of a demo: starts its scheduler, shows its events, and kills a process midway as `--kill` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.abc

from hypha_local.display import Display, EventLog
from hypha_local.errors import ProcessFailedError
from hypha_local.network_layout import SPARE, Folders, NodePlan
from hypha_local.nodes import start_node
from hypha_local.processes import LocalProcess, Processes, script
from hypha_proto.job_events import describe_event

Victim = Literal["worker", "executor", "parameter-server", "scheduler", "data"]
REPLACED: Final[tuple[Victim | None, ...]] = ("worker", "executor", "parameter-server")
"""What a training job replaces by a spare worker, an executor if it fails again and again."""
STEP_TIMEOUT: Final = 120.0
"""Timeout in seconds for creating the model, preparing the data, evaluating, and auditing."""
KILL_AFTER: Final = 0.4
"""Share of the job after which `--kill` kills."""
_WORKER: Final = "worker-1"
_POLL: Final = 0.05


@dataclass(frozen=True, slots=True)
class JobKind:
    """What differs between the jobs of demos."""

    unit: str
    """What is counted: ``rounds`` or ``parts``."""
    share: Callable[[dict[str, Any]], float | None]
    """Returns how much of the job is done, by an event of the scheduler; None if the event does not say."""
    executor: str
    """Module that an executor runs."""
    continue_with: Callable[[], LocalProcess]
    """Continues the job after its scheduler was killed."""


class JobRun:
    """The running job, and what is killed during it."""

    def __init__(
        self,
        processes: Processes,
        folders: Folders,
        nodes: Sequence[NodePlan],
        kind: JobKind,
        kill: Victim | None,
        display: Display,
    ) -> None:
        self._processes, self._folders, self._display = processes, folders, display
        self._nodes = {node.name: node for node in nodes}
        self._kind = kind
        self._kill = kill
        self._log = EventLog(folders.runs)
        self._share = 0.0
        self._is_placed = False
        """Whether the job has its first leases."""
        self._killed_at: float | None = None
        self.changes: list[str] = []
        """Changes of the job's members since something was killed, each with the seconds since then."""

    async def run(self) -> None:
        """Start the scheduler, show its events until the job has ended, and kill what is to be killed.

        Raises:
            ProcessFailedError: a node has ended, the job has failed, or nothing could be killed before it ended.
        """
        scheduler = start_node(self._processes, self._folders, self._nodes["scheduler"])
        self._display.step("scheduler started with the job")
        victim = _WORKER if self._kill == "worker" else self._kill
        watched = [name for name in self._nodes if name not in ("scheduler", SPARE, victim)]
        with self._display.counting(self._kind.unit):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._processes.watch, watched)
                scheduler = await self._follow(scheduler, tasks)
                tasks.cancel_scope.cancel()
            self._show()
        if scheduler.process.returncode != 0:
            raise ProcessFailedError(
                f"scheduler ended with status {scheduler.process.returncode}; its last lines ({scheduler.log}):\n"
                + scheduler.last_lines()
            )
        if self._kill is not None:
            raise ProcessFailedError(f"--kill {self._kill}: the job had ended before")

    async def _follow(self, scheduler: LocalProcess, tasks: anyio.abc.TaskGroup) -> LocalProcess:
        """Show events until the job has ended; return the scheduler's last process."""
        spare = self._nodes.get(SPARE)
        while scheduler.process.poll() is None:
            self._show()
            if spare is not None and self._is_placed:  # only now, so that the job begins without it
                start_node(self._processes, self._folders, spare)
                tasks.start_soon(self._processes.watch, [SPARE])
                self._display.step("a spare worker started")
                spare = None
            if self._kill is not None and self._share >= KILL_AFTER:
                scheduler = await self._strike(self._kill, scheduler)
            await anyio.sleep(_POLL)
        return scheduler

    def _show(self) -> None:
        for event in self._log.read():
            share = self._kind.share(event)
            self._share = self._share if share is None else share
            self._is_placed |= event["event"] == "placement"
            self._display.event(event)
            if self._killed_at is not None and (change := describe_event(event)) is not None:
                seconds = event["time"] - self._killed_at
                self.changes.append(f"after {seconds:.1f} s {self._display.named(change)}")

    async def _strike(self, victim: Victim, scheduler: LocalProcess) -> LocalProcess:
        """Kill a process with SIGKILL, and do what its owner would do; return the running scheduler."""
        processes, when = self._processes, f"after {self._share:.0%} of the {self._kind.unit}"
        if victim == "executor":
            if not processes.kill_descendant(_WORKER, self._kind.executor):
                return scheduler  # it has just ended; its successor is killed
            self._display.step(when, alarm=f"executor of {_WORKER} killed")
        else:
            name = _WORKER if victim == "worker" else victim
            await processes.kill(name)
            self._display.step(when, alarm=f"{name} killed")
        self._kill, self._killed_at = None, time.time()
        if victim == "data":
            start_node(processes, self._folders, self._nodes[victim])
            self._display.step("data node started again")
        return self._kind.continue_with() if victim == "scheduler" else scheduler


def job_directory(folders: Folders) -> Path:
    """Return the directory of the only job."""
    [journal] = folders.runs.glob("*/journal.jsonl")
    return journal.parent


async def audit_job(processes: Processes, folders: Folders) -> None:
    """Audit the job's directory with the command; what it says goes to `Folders.audit`."""
    command = [script("hypha-scheduler"), "audit", str(job_directory(folders))]
    await processes.run("audit", command, timeout=STEP_TIMEOUT, stdout=folders.audit)
