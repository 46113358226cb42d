"""Ends a process and its descendants, including those that left its process group or were orphaned.

The processes of a job carry a token in their environment, by which those outside the process group are found. One that
removes the variable and leaves the group is found where an isolation layer knows all processes of the run, as
`isolation.cgroup` does, or ends with the process that the layer has put in front of it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import psutil

from hypha_worker.executors.isolation.layers import Confined, in_own_thread
from hypha_worker.executors.process.spawn import SpawnedProcess
from hypha_worker.work_dir import work_dir_key

_log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "_HYPHA_JOB"  # not HYPHA_…: those variables are configuration keys
TERM_GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SHUTDOWN_GRACE: Final = 2.0
"""The same while the worker shuts down, which must not take more than a few seconds."""
KILL_GRACE: Final = 3.0
"""Seconds that processes get to disappear after SIGKILL; one that waits for a device may take longer."""
_POLL: Final = 0.02
_REPEATED_KILL: Final = 0.2
_LAYERS_GRACE: Final = 1.0
"""Seconds that the layers have to end all processes before the group gets SIGKILL too, the launcher in it included."""
_LEFT_TIMEOUT: Final = 2.0
_ENVIRONMENT_LIMIT: Final = 1 << 20
"""Bytes of an environment that are read. A process may declare any of its memory to be it (PR_SET_MM_MAP)."""


def make_token(work_dir: Path) -> str:
    """Return a token that marks the processes of one run.

    Args:
        work_dir: the worker's, so that `end_left_processes` finds what it leaves when it is killed.
    """
    return f"{work_dir_key(work_dir)}-{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The processes of one run: the group of `leader`, those with `token`, and those that the layers know."""

    leader: SpawnedProcess
    """The leader of its own session."""
    token: str
    """Value of `TOKEN_VARIABLE` in the environment of the run's processes."""
    killer: Confined
    """What the isolation layers know of the run."""
    found: set[psutil.Process] = field(default_factory=set)
    """Processes seen before: one that is exiting has no environment any more, but still holds memory and files."""

    async def find(self) -> list[psutil.Process]:
        """Return every live process; also reap the leader."""
        with anyio.move_on_after(0):
            await self.leader.wait()
        survivors = await in_own_thread(partial(_scan, self.leader.pid, self.token, self.killer, self.found))
        self.found.clear()
        self.found.update(survivors)
        return survivors

    async def pids(self) -> Sequence[int]:
        """Return the ids of all live processes."""
        return [found.pid for found in await self.find()]

    def signal(self, found: list[psutil.Process], number: signal.Signals) -> None:
        """Send a signal to the group and to the processes that were found."""
        _signal_group(self.leader.pid, number)
        _signal_each(found, number)

    async def kill_by_layers(self) -> bool:
        """Let the layers end all processes, also those that only they know; return False if they cannot."""
        return await in_own_thread(self.killer.kill)


def is_in_run(pid: int, leader: int, killer: Confined) -> bool:
    """Return whether a process is a descendant of a run's leader, in its session, or one that the layers know.

    Not by the token: another job of the same user may read it. The session is the leader's own, and nobody enters it.
    """
    each = pid
    while each > 1 and (status := _read_status(each)) is not None:
        parent, session = status
        if leader in (each, session):
            return True
        each = parent
    return pid in (killer.pids() or ())


def _read_status(pid: int) -> tuple[int, int] | None:
    """Return the parent and the session of a process; None if it has ended. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[3])


async def terminate_tree(
    process: SpawnedProcess,
    token: str,
    confined: Confined,
    grace: float = TERM_GRACE,
    kill_grace: float = KILL_GRACE,
) -> ProcessTree | None:
    """End a process and everything that it has started; bounded in time, not cancellable.

    Args:
        process: the leader of its own session.
        token: value of `TOKEN_VARIABLE` in the environment of the job's processes.
        confined: what the isolation layers know of them.
        grace: seconds between SIGTERM and SIGKILL. A tree that has already ended gets no signal.
        kill_grace: seconds after SIGKILL until the processes are given up.

    Returns:
        The tree if processes of it survive SIGKILL, which is logged as an error; else None.
    """
    with anyio.CancelScope(shield=True):
        tree = ProcessTree(process, token, confined)
        survivors = await tree.find()
        if survivors:
            tree.signal(survivors, signal.SIGTERM)
            tree.signal(survivors, signal.SIGCONT)  # a stopped process gets no other signal but SIGKILL
            survivors = await _wait_for_exit(tree, grace)
        if survivors:
            survivors = await _kill(tree, survivors, kill_grace)
        if not survivors:
            with anyio.move_on_after(kill_grace):  # it may have ended after it was waited for last
                await process.wait()
    if survivors:
        pids = ", ".join(str(each.pid) for each in survivors)
        _log.error("processes %s of a job live %g s after SIGKILL; look at them with ps", pids, kill_grace)
    return tree if survivors else None


async def _kill(tree: ProcessTree, survivors: list[psutil.Process], grace: float) -> list[psutil.Process]:
    """Kill until nothing is left or the time is over: a process may have been started after the last scan.

    The layers come first: the supervisor can end what left the group only as long as it lives itself.
    """
    deadline = anyio.current_time() + grace
    if await tree.kill_by_layers():
        survivors = await _wait_for_exit(tree, min(grace, _LAYERS_GRACE))
    while survivors and (left := deadline - anyio.current_time()) > 0:
        await tree.kill_by_layers()
        tree.signal(survivors, signal.SIGKILL)
        survivors = await _wait_for_exit(tree, min(left, _REPEATED_KILL))
    return survivors


def end_left_processes(work_dir: Path) -> None:
    """Kill the processes of jobs of a work directory; called when no worker runs in it. Blocks for up to two seconds.

    Finds those with a token in their environment that are this user's; for root, all.
    """
    wanted = f"\0{TOKEN_VARIABLE}={work_dir_key(work_dir)}-".encode()
    deadline = time.monotonic() + _LEFT_TIMEOUT
    while left := _find_left(wanted):
        pids = ", ".join(str(found.pid) for found in left)
        if time.monotonic() >= deadline:
            _log.error("processes %s, left by a worker that was killed, cannot be ended; look at them with ps", pids)
            return
        _log.warning("ending processes %s, left by a worker that was killed", pids)
        _signal_each(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=_LEFT_TIMEOUT / 4)


def _find_left(wanted: bytes) -> list[psutil.Process]:
    """Return the live processes with a variable in their environment; none where there is no procfs."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if sys.platform == "linux" else []
    found = [process for pid in pids if wanted in _read_environment(pid) and (process := _open(pid)) is not None]
    return [process for process in found if process.pid != os.getpid() and not _is_zombie(process)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def _wait_for_exit(tree: ProcessTree, grace: float) -> list[psutil.Process]:
    deadline = anyio.current_time() + grace
    pause = _POLL
    while survivors := await tree.find():
        if anyio.current_time() >= deadline:
            return survivors
        await anyio.sleep(pause)
        pause = min(0.2, pause * 1.5)
    return []


def _scan(group: int, token: str, killer: Confined, seen: Set[psutil.Process]) -> list[psutil.Process]:
    """Return the live processes among those of the group, those with the token, those that the layers know, and `seen`.

    Those of other users count for root alone, who may end them.
    """
    uid = os.getuid()
    known = killer.pids() or ()
    pids = _find_in_proc(group, token) if sys.platform == "linux" else psutil.pids()
    opened = {found for pid in {*pids, *known} if (found := _open(pid)) is not None}
    return [
        found
        for found in opened | {each for each in seen if each.is_running()}
        if _belongs(found, group, token, uid, is_known=found.pid in known or found in seen)
    ]


def _find_in_proc(group: int, token: str) -> list[int]:
    """Return the processes that are in the group or have the token, ended ones among them.

    Reads /proc itself, a tenth of the time of psutil: a job that has left nothing running pays for this scan alone.
    """
    groups = {int(name): _group_of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return [pid for pid, found in groups.items() if found == group or (found != 0 and _has_token(pid, token))]


def _has_token(pid: int, token: str) -> bool:
    if sys.platform != "linux":
        return psutil.Process(pid).environ().get(TOKEN_VARIABLE) == token
    return f"\0{TOKEN_VARIABLE}={token}\0".encode() in _read_environment(pid)


def _group_of(pid: int) -> int:
    """Return the group of a process; 0, which threads of the kernel have, if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _read_environment(pid: int) -> bytes:
    """Return a process's environment with a zero byte before each variable; empty if it ended or is another user's.

    At most the first `_ENVIRONMENT_LIMIT` bytes.
    """
    found = bytearray(b"\0")
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        while len(found) < _ENVIRONMENT_LIMIT and (part := os.read(descriptor, 1 << 16)):
            found += part
    except OSError:  # it has ended meanwhile
        return b""
    finally:
        os.close(descriptor)
    return bytes(found)


def _open(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended
        return None


def _belongs(found: psutil.Process, group: int, token: str, uid: int, *, is_known: bool) -> bool:
    try:
        with found.oneshot():
            if found.pid == os.getpid() or found.status() == psutil.STATUS_ZOMBIE:
                return False
            if is_known:
                return True
            is_own = uid in (0, found.uids().real)
            return is_own and (os.getpgid(found.pid) == group or _has_token(found.pid, token))
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _signal_each(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks that the pid was not reused
        except psutil.NoSuchProcess:
            continue
