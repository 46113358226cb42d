"""End a process and everything that it started, also what left its process group or was orphaned.

A job's processes carry a token in their environment. What a group signal does not reach is found by it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
import psutil

TOKEN_VARIABLE: Final = "_HYPHA_JOB"  # not HYPHA_…: those are keys of a configuration
TERM_GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SHUTDOWN_GRACE: Final = 2.0
"""The same when the worker itself is ending: all of that is bounded to a few seconds."""
KILL_GRACE: Final = 2.0
_POLL: Final = 0.02


async def terminate_tree(process: anyio.abc.Process, token: str, grace: float = TERM_GRACE) -> None:
    """End the process group of `process` and every process that carries `token`; bounded, and not cancellable.

    Args:
        process: the leader of its own session.
        token: value of `TOKEN_VARIABLE` in the environment of the job's processes.
        grace: seconds for an orderly end. A tree that has ended by itself is only looked at.
    """
    with anyio.CancelScope(shield=True):
        survivors = await _find(process, token)
        if not survivors:
            return
        _signal_group(process.pid, signal.SIGTERM)
        _signal_each(survivors, signal.SIGTERM)
        survivors = await _wait_gone(process, token, grace)
        if not survivors:
            return
        _signal_group(process.pid, signal.SIGKILL)
        _signal_each(survivors, signal.SIGKILL)
        await _wait_gone(process, token, KILL_GRACE)


async def _wait_gone(process: anyio.abc.Process, token: str, grace: float) -> list[psutil.Process]:
    deadline = anyio.current_time() + grace
    pause = _POLL
    while survivors := await _find(process, token):
        if anyio.current_time() >= deadline:
            return survivors
        await anyio.sleep(pause)
        pause = min(0.2, pause * 1.5)
    return []


async def _find(process: anyio.abc.Process, token: str) -> list[psutil.Process]:
    """Every live process of the job; the leader is reaped on the way."""
    with anyio.move_on_after(0):
        await process.wait()
    return await anyio.to_thread.run_sync(_scan, process.pid, token)


def _scan(group: int, token: str) -> list[psutil.Process]:
    me = os.getuid()
    return [found for found in psutil.process_iter() if _belongs(found, group, token, me)]


def _belongs(found: psutil.Process, group: int, token: str, me: int) -> bool:
    try:
        with found.oneshot():
            if found.pid == os.getpid() or found.uids().real != me or found.status() == psutil.STATUS_ZOMBIE:
                return False
            environment: Mapping[str, str] = found.environ()
            return environment.get(TOKEN_VARIABLE) == token or os.getpgid(found.pid) == group
    except (psutil.Error, OSError):  # gone, or not ours to look at
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _signal_each(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks that the pid was not given to another process since
        except psutil.NoSuchProcess:
            continue
