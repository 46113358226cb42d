"""Ends a process and its descendants, including those that left its process group or were orphaned.

Called by `process_runner`. The processes of a job carry a token in their environment, by which those outside the
process group are found; a process that removes the variable and leaves the group is not found.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
import psutil

_log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "_HYPHA_JOB"  # not HYPHA_…: those variables are configuration keys
TERM_GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SHUTDOWN_GRACE: Final = 2.0
"""The same while the worker shuts down, which must not take more than a few seconds."""
KILL_GRACE: Final = 2.0
"""Seconds that processes get to disappear after SIGKILL before an error is logged."""
KILL_TIMEOUT: Final = 30.0
"""Seconds after SIGKILL for which the job's resources stay taken; a process that waits for a device may take long."""
_POLL: Final = 0.02


async def terminate_tree(
    process: anyio.abc.Process, token: str, grace: float = TERM_GRACE, kill_timeout: float = KILL_TIMEOUT
) -> None:
    """End the process group of `process` and every process with `token`; bounded in time, not cancellable.

    Processes that survive SIGKILL are logged as an error.

    Args:
        process: the leader of its own session.
        token: value of `TOKEN_VARIABLE` in the environment of the job's processes.
        grace: seconds between SIGTERM and SIGKILL. A tree that has already ended gets no signal.
        kill_timeout: seconds after SIGKILL until the processes are given up.
    """
    with anyio.CancelScope(shield=True):
        survivors = await _find(process, token)
        if not survivors:
            return
        _signal_group(process.pid, signal.SIGTERM)
        _signal_each(survivors, signal.SIGTERM)
        survivors = await _wait_for_exit(process, token, grace)
        if not survivors:
            return
        _signal_group(process.pid, signal.SIGKILL)
        _signal_each(survivors, signal.SIGKILL)
        await _wait_after_kill(process, token, kill_timeout)


async def _wait_after_kill(process: anyio.abc.Process, token: str, timeout: float) -> None:
    waited = min(KILL_GRACE, timeout)
    survivors = await _wait_for_exit(process, token, waited)
    if survivors and timeout > waited:
        _log.error("%s of a job live %g s after SIGKILL; its resources stay taken for up to %g s more",
                   _name(survivors), waited, timeout - waited)  # fmt: skip
        survivors = await _wait_for_exit(process, token, timeout - waited)
    if survivors:
        _log.error("%s of a job live %g s after SIGKILL and are given up: what they use counts as free but is not; "
                   "look at them with ps", _name(survivors), timeout)  # fmt: skip


def _name(processes: list[psutil.Process]) -> str:
    return f"processes {', '.join(str(process.pid) for process in processes)}"


async def _wait_for_exit(process: anyio.abc.Process, token: str, grace: float) -> list[psutil.Process]:
    deadline = anyio.current_time() + grace
    pause = _POLL
    while survivors := await _find(process, token):
        if anyio.current_time() >= deadline:
            return survivors
        await anyio.sleep(pause)
        pause = min(0.2, pause * 1.5)
    return []


async def _find(process: anyio.abc.Process, token: str) -> list[psutil.Process]:
    """Return every live process of the job; also reap the leader."""
    with anyio.move_on_after(0):
        await process.wait()
    # a thread of its own: the end of a job must not wait for other jobs' threads
    return await anyio.to_thread.run_sync(_scan, process.pid, token, limiter=anyio.CapacityLimiter(1))


def _scan(group: int, token: str) -> list[psutil.Process]:
    uid = os.getuid()
    pids = _find_in_proc(group, token) if sys.platform == "linux" else psutil.pids()
    return [found for pid in pids if (found := _open(pid)) is not None and _belongs(found, group, token, uid)]


def _find_in_proc(group: int, token: str) -> list[int]:
    """Return the processes that are in the group or have the token, ended ones among them.

    Reads /proc itself, a tenth of the time of psutil: a job that has left nothing running pays for this scan alone.
    """
    wanted = f"\0{TOKEN_VARIABLE}={token}\0".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _is_in_group(pid, group) or wanted in _read_environment(pid)]


def _is_in_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def _read_environment(pid: int) -> bytes:
    """Return a process's environment with a zero byte before each variable; empty if it ended or is another user's."""
    parts = [b"\0"]
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:  # it has ended meanwhile
        return b""
    finally:
        os.close(descriptor)
    return b"".join(parts)


def _open(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended
        return None


def _belongs(found: psutil.Process, group: int, token: str, uid: int) -> bool:
    try:
        with found.oneshot():
            if found.pid == os.getpid() or found.uids().real != uid or found.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getpgid(found.pid) == group or found.environ().get(TOKEN_VARIABLE) == token
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _signal_each(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks that the pid was not reused
        except psutil.NoSuchProcess:
            continue
