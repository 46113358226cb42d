"""The commands ``pause`` and ``resume`` of the control socket: no more offers, until the owner wants so.

That a worker is paused is a file in its control folder, so that it stays so over restarts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_worker.control.server import Answer
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.work_dir import control_folder, prepare_control_folder

_log = logging.getLogger(__name__)

PAUSED_NAME: Final = "paused"


def load_pause(work_dir: Path) -> bool:
    """Return whether the worker with this work directory is paused, and log it."""
    path = control_folder(work_dir) / PAUSED_NAME
    is_paused = path.exists()
    if is_paused:
        _log.warning("this worker is paused and makes no offers: hypha-worker resume ends that (%s)", path)
    return is_paused


def store_pause(work_dir: Path, *, is_paused: bool) -> None:
    """Store whether a worker is paused; when this returns, it is on disk.

    Raises:
        OSError: it cannot be stored.
    """
    folder = prepare_control_folder(work_dir)
    path = folder / PAUSED_NAME
    if is_paused:
        path.touch(mode=0o600)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class PauseCommands:
    """See the module."""

    work_dir: Path
    leases: LeaseManager
    on_resume: Callable[[], Awaitable[None]]
    """Called when the worker is resumed, also if it was not paused."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while the state on disk and in memory changes, so that commands at the same time leave both equal."""

    async def pause(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        await self._set(arguments, is_paused=True)
        await answer({"paused": True, "jobs": sum(lease.has_job for lease in self.leases.leases)})

    async def resume(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        await self._set(arguments, is_paused=False)
        await self.on_resume()
        await answer({"paused": False, "draining": self.leases.is_closed})

    async def _set(self, arguments: Mapping[str, Any], *, is_paused: bool) -> None:
        if arguments:
            raise ValueError("pause and resume take no arguments")
        async with self._lock:
            await anyio.to_thread.run_sync(lambda: store_pause(self.work_dir, is_paused=is_paused))
            if self.leases.is_paused != is_paused:
                _log.info("paused by its owner: no more offers" if is_paused else "resumed by its owner")
            self.leases.is_paused = is_paused
