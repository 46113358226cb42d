"""The running job of a demo: starts its scheduler, shows its events, and kills a process midway as `--kill` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

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


@dataclass(slots=True)
class JobRun:
    """The running job, and what is killed during it."""

    processes: Processes
    folders: Folders
    nodes: Sequence[NodePlan]
    executor: str
    """Module that an executor runs."""
    kill: Victim | None
    continue_job: Callable[[], LocalProcess]
    """Continues the job after its scheduler was killed."""
    display: Display
    changes: list[str] = field(default_factory=list)
    """Changes of the job's members since something was killed, each with the seconds since then."""
    _share: float = 0.0
    _is_placed: bool = False
    """Whether the job has its first leases."""
    _killed_at: float | None = None

    @property
    def _unit(self) -> str:
        return "rounds" if self.display.rounds else "parts"

    def _start(self, name: str) -> LocalProcess:
        return start_node(self.processes, self.folders, next(node for node in self.nodes if node.name == name))

    async def run(self) -> None:
        """Start the scheduler, show its events until the job has ended, and kill what is to be killed.

        Raises:
            ProcessFailedError: a node has ended, the job has failed, or nothing could be killed before it ended.
        """
        scheduler, log = self._start("scheduler"), EventLog(self.folders.runs)
        self.display.step("scheduler started with the job")
        victim = _WORKER if self.kill == "worker" else self.kill
        watched = [node.name for node in self.nodes if node.name not in ("scheduler", SPARE, victim)]
        with self.display.counting(self._unit):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.processes.watch, watched)
                scheduler = await self._follow(scheduler, log, tasks)
                tasks.cancel_scope.cancel()
            self._show(log)
        if scheduler.process.returncode != 0:
            raise scheduler.ended()
        if self.kill is not None:
            raise ProcessFailedError(f"--kill {self.kill}: the job had ended before")

    async def _follow(self, scheduler: LocalProcess, log: EventLog, tasks: anyio.abc.TaskGroup) -> LocalProcess:
        """Show events until the job has ended; return the scheduler's last process."""
        has_spare = any(node.name == SPARE for node in self.nodes)
        while scheduler.process.poll() is None:
            self._show(log)
            if has_spare and self._is_placed:  # only now, so that the job begins without it
                self._start(SPARE)
                tasks.start_soon(self.processes.watch, [SPARE])
                self.display.step("a spare worker started")
                has_spare = False
            if self.kill is not None and self._share >= KILL_AFTER:
                scheduler = await self._strike(self.kill, scheduler)
            await anyio.sleep(_POLL)
        return scheduler

    def _show(self, log: EventLog) -> None:
        for event in log.read():
            if event["event"] == "round":
                self._share = event["round"] / self.display.rounds
            elif event["event"] == "part":
                self._share = event["committed"] / event["slices"]
            self._is_placed |= event["event"] == "placement"
            self.display.event(event)
            if self._killed_at is not None and (change := describe_event(event)) is not None:
                seconds = event["time"] - self._killed_at
                self.changes.append(f"after {seconds:.1f} s {self.display.named(change)}")

    async def _strike(self, victim: Victim, scheduler: LocalProcess) -> LocalProcess:
        """Kill a process with SIGKILL, and do what its owner would do; return the running scheduler."""
        when = f"after {self._share:.0%} of the {self._unit}"
        if victim == "executor":
            if not self.processes.kill_descendant(_WORKER, self.executor):
                return scheduler  # it has just ended; its successor is killed
            self.display.step(when, alarm=f"executor of {_WORKER} killed")
        else:
            name = _WORKER if victim == "worker" else victim
            await self.processes.kill(name)
            self.display.step(when, alarm=f"{name} killed")
        self.kill, self._killed_at = None, time.time()
        if victim == "data":
            self._start(victim)
            self.display.step("data node started again")
        return self.continue_job() if victim == "scheduler" else scheduler


def job_directory(folders: Folders) -> Path:
    """Return the directory of the only job."""
    [journal] = folders.runs.glob("*/journal.jsonl")
    return journal.parent


async def audit_job(processes: Processes, folders: Folders) -> None:
    """Audit the job's directory with the command; what it says goes to `Folders.audit`."""
    command = [script("hypha-scheduler"), "audit", str(job_directory(folders))]
    await processes.run("audit", command, timeout=STEP_TIMEOUT, stdout=folders.audit)
