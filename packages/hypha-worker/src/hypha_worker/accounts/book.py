"""Keeps the accounts of a worker's leases: notes each when it is accepted, and stores what it has earned."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_net.log_throttle import LogThrottle
from hypha_net.peer_names import known_name
from hypha_worker.accounts.storage import RUNNING, AccountFiles, LeaseAccount
from hypha_worker.leasing.lease_manager import Lease

_log = logging.getLogger(__name__)

INTERVAL: Final = 1.0
"""Seconds between looking for leases that are over."""
HELD_INTERVAL: Final = 5.0
"""Seconds between storing those that are held: what a worker that is killed loses at most, and `INTERVAL`."""


@dataclass(slots=True)
class _HeldLease:
    lease: Lease
    began: float
    """Seconds since the epoch."""

    @property
    def is_over(self) -> bool:
        """Whether it earns nothing more, and its job has ended."""
        return self.lease.end is not None and not self.lease.has_task

    def account(self, now: float, outcome: str) -> LeaseAccount:
        """Return its account at a time since the epoch."""
        lease = self.lease
        return LeaseAccount(
            lease=str(lease.id),
            job=None if lease.job_id is None else str(lease.job_id),
            scheduler=str(lease.scheduler),
            began=round(self.began, 3),
            updated=round(now, 3),
            seconds=round(lease.charged, 3),
            price=lease.price,
            tokens=round(lease.owed, 6),
            outcome=outcome,
            name=known_name(lease.scheduler),
        )

    @property
    def outcome(self) -> str:
        """How its last job has ended, or the lease if it had none."""
        if self.lease.outcome:
            return self.lease.outcome
        return "worker-ended" if self.lease.end is None else self.lease.end.value


@dataclass(slots=True)
class AccountBook:
    """The accounts of one worker."""

    work_dir: Path
    wall_clock: Callable[[], float] = time.time
    _files: AccountFiles | None = None
    """None if the accounts cannot be kept."""
    _held: dict[uuid.UUID, _HeldLease] = field(default_factory=dict)
    _unstored: deque[LeaseAccount] = field(default_factory=deque)
    """Leases that could not be stored yet, as on a full disk."""
    _held_stored_at: float = -math.inf
    _failures: LogThrottle = field(default_factory=lambda: LogThrottle(time.monotonic))

    def open(self) -> None:
        """Take up what a killed worker has left; a warning says if the accounts cannot be kept."""
        files = AccountFiles(self.work_dir)
        try:
            self._unstored.extend(files.open())
        except OSError as error:
            _log.warning("the accounts of this worker are not kept: %s", error)
            return
        self._files = files

    def add(self, lease: Lease) -> None:
        """Note a lease that was just accepted."""
        if self._files is not None:
            self._held[lease.id] = _HeldLease(lease, self.wall_clock())

    async def run(self) -> None:
        """Store the accounts regularly, until cancelled."""
        while True:
            now = self.wall_clock()
            held = self._take_changes(now)
            if held is not None or self._unstored:
                await anyio.to_thread.run_sync(self._store, held)
            await anyio.sleep(INTERVAL)

    def close(self) -> None:
        """Store the accounts of all leases, which end with the worker."""
        now = self.wall_clock()
        self._unstored.extend(held.account(now, held.outcome) for held in self._held.values())
        self._held.clear()
        self._store([])
        if self._files is not None:
            self._files.close()

    def _take_changes(self, now: float) -> list[LeaseAccount] | None:
        """Move the leases that are over to what is to be stored; return those that are held if these are due, too."""
        over = [held for held in self._held.values() if held.is_over]
        for held in over:
            del self._held[held.lease.id]
            self._unstored.append(held.account(now, held.outcome))
        is_due = not 0 <= now - self._held_stored_at < HELD_INTERVAL
        if not over and not (is_due and self._held):
            return None
        self._held_stored_at = now
        return [held.account(now, RUNNING) for held in self._held.values()]

    def _store(self, held: list[LeaseAccount] | None) -> None:
        if self._files is None:
            return
        try:
            if self._unstored:
                count = len(self._unstored)
                self._files.append(list(self._unstored))
                for _ in range(count):
                    self._unstored.popleft()
            if held is not None:
                self._files.store_held(held)
        except OSError as error:
            text = "the accounts cannot be stored and are kept in memory: %s"
            self._failures.log(_log, logging.WARNING, error.errno, text, error)
