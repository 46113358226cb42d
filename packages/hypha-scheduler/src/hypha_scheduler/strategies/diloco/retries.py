"""Retries of training executors: what follows the unexpected end of one. Pure.

An executor is started again on its lease as often as `RESTART` says, with a smaller micro-batch if memory ended it.
Then its worker is replaced. A fault that is the job's own, because the executor says so or because two workers have it,
ends the job.

A worker reports the exit code and the last lines of the command that it has started. `accelerate launch` exits with 1
whatever its processes exit with, and prints a traceback of its own after their last lines.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hypha_net.retries import RetryPolicy
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TaskEnded

RESTART: Final = RetryPolicy("an executor that trains has ended", (0.0,) * 2)
ROUNDS_TO_FORGET: Final = 3
"""Rounds in which an update of a worker counts until its earlier failures are forgotten."""
INVALID_JOB: Final = 2
"""Exit code of an executor whose job is invalid or not supported."""
OTHER_MODEL: Final = os.EX_DATAERR
"""Exit code of an executor that finds that the delivered model would not load with the trained weights."""
DISK_FAULT: Final = os.EX_IOERR
"""Exit code of an executor whose disk is full or fails."""
OUT_OF_MEMORY: Final = os.EX_TEMPFAIL
"""Exit code of an executor that could not allocate memory."""
_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""SIGKILL, which the kernel sends when memory is exhausted; the second as a shell reports it."""
_VARYING: Final = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+", re.IGNORECASE)
"""Addresses, UUIDs and numbers, in which the same error differs from worker to worker."""


_LAUNCHER_CODE: Final = 1
_END: Final = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid|returned non-zero exit status (\d+)\.$")
"""Where `accelerate launch` says with what a process has exited: with several processes, or with one."""
_SIGNALLED: Final = re.compile(r"died with <Signals\.\w+: (\d+)>\.$")
_TRACEBACK: Final = "Traceback (most recent call last):"
_ELASTIC: Final = re.compile(r"[WEI]\d{4} \d\d:\d\d:")
"""Begin of a line that the launcher of several processes logs."""
_ERROR: Final = re.compile(r"(ERROR|CRITICAL) [\w.]+: ")
"""Begin of a line that an executor logs as an error; the worker puts the last one of them first."""


def end_of_process(end: TaskEnded) -> TaskEnded:
    """Return the end of the process that has computed: its exit code, and its last lines with its error as the last."""
    lines = [line for line in end.last_lines if line.strip()]
    code = _launched_code(lines) if end.exit_code == _LAUNCHER_CODE else None
    if code is not None:
        lines = _without_launcher(lines)
    if lines and _ERROR.match(lines[0]):
        lines = [*lines[1:], lines[0]]
    return replace(end, exit_code=end.exit_code if code is None else code, last_lines=tuple(lines))


def _launched_code(lines: Sequence[str]) -> int | None:
    """Return with what the process has exited that failed first, which the launcher names last; None without one."""
    for line in reversed(lines):
        if (found := _END.search(line)) is not None:
            return int(found[1] or found[2])
        if (found := _SIGNALLED.search(line)) is not None:
            return -int(found[1])
    return None


def _without_launcher(lines: Sequence[str]) -> list[str]:
    """Return the lines before the launcher's traceback, which is the last one."""
    begin = max((number for number, line in enumerate(lines) if line == _TRACEBACK), default=len(lines))
    return [line for line in lines[:begin] if not _ELASTIC.match(line)]


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the executor again on its lease."""

    micro_batch: int | None = None
    """Largest number of samples that it computes at once; None for the whole batch."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Release the lease, exclude the peer from the job, and find another worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """End the job."""

    reason: str
    """What happened and the last lines of the executor's output; the operator puts task and worker before it."""


@dataclass(slots=True)
class _History:
    """Failures on one lease."""

    peer: PeerId
    restarts: int = 0
    micro_batch: int | None = None
    """Micro-batch since memory has ended its executor; stays when failures are forgotten."""
    error: str | None = None
    """Last error, without what varies."""
    description: str = ""
    """Description of the end with that error, with the last lines of the executor."""
    counted: int = 0
    """Rounds that have counted since the last failure."""


@dataclass(slots=True)
class ExecutorRetries:
    """Failures of the training executors of one job."""

    _leases: dict[uuid.UUID, _History] = field(default_factory=dict)

    def count_failure(
        self, peer: PeerId, lease: uuid.UUID, end: TaskEnded, at_once: int
    ) -> Restart | Replace | FailJob:
        """Count the end of an executor before the job was done; return what follows.

        Args:
            peer: its worker.
            lease: its lease.
            end: how it ended.
            at_once: largest number of samples that it has computed at once, as it stated; else the samples of a batch.
        """
        history = self._leases.setdefault(lease, _History(peer))
        history.counted = 0
        end = end_of_process(end)
        if end.exit_code == DISK_FAULT:
            return Replace(describe(end))
        if end.exit_code == INVALID_JOB:
            return FailJob(describe(end, with_lines=True))
        if is_own_fault(end):
            history.error, history.description = error_of(end), describe(end, with_lines=True)
            if (other := self._other_with(peer, history.error)) is not None:
                first = f"the same error ended the executor of {other.peer} before: {other.description}"
                return FailJob(f"{history.description}\n{first}")
        if history.restarts >= RESTART.times:
            return Replace(f"its executor failed {history.restarts + 1} times: {describe(end)}")
        if is_out_of_memory(end):
            before = min(history.micro_batch or at_once, at_once)
            if before == 1 and has_stated_exhausted_memory(end):
                return Replace(f"its memory does not suffice for one sample at a time: {describe(end)}")
            history.micro_batch = max(1, before // 2)
        history.restarts += 1
        return Restart(history.micro_batch)

    def _other_with(self, peer: PeerId, error: str) -> _History | None:
        """Return the failures of another worker that had an error, or None."""
        found = (history for history in self._leases.values() if history.error == error and history.peer != peer)
        return next(found, None)

    def round_counted(self, peer: PeerId) -> None:
        """Process that a worker's update counts in a round; after `ROUNDS_TO_FORGET` its failures are forgotten."""
        for history in self._leases.values():
            if history.peer != peer:
                continue
            history.counted += 1
            if history.counted >= ROUNDS_TO_FORGET:
                history.restarts, history.error = 0, None

    def micro_batch(self, lease: uuid.UUID) -> int | None:
        """Return the micro-batch of executors on a lease; None for the whole batch."""
        found = self._leases.get(lease)
        return None if found is None else found.micro_batch


def is_out_of_memory(end: TaskEnded) -> bool:
    """Return whether memory has ended an executor, as far as its end tells."""
    return end.exit_code in _KILLED or has_stated_exhausted_memory(end)


def has_stated_exhausted_memory(end: TaskEnded) -> bool:
    """Return whether an executor, or what limits its memory, says that memory has ended it; a signal alone does not."""
    return end.exit_code == OUT_OF_MEMORY or "memory" in end.reason.lower()


def is_own_fault(end: TaskEnded) -> bool:
    """Return whether an executor ended by itself and not by a signal or for want of memory.

    Only then do equal errors of two workers show a fault of the job.
    """
    is_signalled = end.exit_code is not None and (end.exit_code < 0 or end.exit_code > 128)
    return end.exit_code is not None and not is_signalled and not is_out_of_memory(end)


def error_of(end: TaskEnded) -> str:
    """Return the last line of an executor's output, or else the reason, without what varies between workers."""
    lines = [line.strip() for line in end.last_lines if line.strip()]
    return _VARYING.sub("#", lines[-1] if lines else end.reason)


def describe(end: TaskEnded, *, with_lines: bool = False) -> str:
    """Describe the end of an executor: state, exit code, reason, and its last line if that tells more.

    Args:
        end: how it ended.
        with_lines: whether to add all of its last lines.
    """
    code = "" if end.exit_code is None else f", exit code {end.exit_code}"
    text = f"executor {end.state.value}{code}: {end.reason or 'it exited before the job was done'}"
    if with_lines:
        return text + "".join(f"\n  | {line}" for line in end.last_lines)
    lines = [line.strip() for line in end.last_lines if line.strip()]
    tells_more = end.exit_code == OUT_OF_MEMORY or is_own_fault(end)  # what a signal ends says nothing about it
    return f"{text}: {lines[-1]}" if lines and tells_more else text
