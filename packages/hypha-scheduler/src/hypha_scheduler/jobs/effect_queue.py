"""Carries out the effects of an operator in their order; journal records are on disk before what follows them.

A record is written when it is submitted; all records that are not yet on disk are synced together. Without a record
nothing waits: the effects are carried out before `submit` returns. Called by `runner`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from hypha_scheduler.jobs.journal import Journal
from hypha_scheduler.strategies.base import Effect, Effects, StartTask, WriteJournal


@dataclass(slots=True)
class EffectQueue:
    """Effects of one job that are not yet carried out."""

    journal: Journal
    carry_out: Callable[[Effect], None]
    """Carries out any effect but `WriteJournal`, without waiting."""
    on_file_error: Callable[[OSError], None]
    """Called when a file cannot be written; the effects that wait for it are dropped, and all that come later."""
    _waiting: deque[Effect | int] = field(default_factory=deque)
    """Effects, and the numbers of the records that must be on disk before those after them."""
    _submitted: int = 0
    _done: int = 0
    _carrying_out: bool = False
    _closed: bool = False
    _progress: anyio.Event = field(default_factory=anyio.Event)
    _unsynced: anyio.Event = field(default_factory=anyio.Event)

    def submit(self, effects: Effects) -> int:
        """Take effects, and carry out those that no record precedes; return a ticket for `wait`.

        Raises:
            TypeError: a record cannot be written as JSON.
            ValueError: a record cannot be written as JSON, or uses a name of the runner's.
        """
        try:
            for effect in effects:
                self._append(self._write(effect) if isinstance(effect, WriteJournal) else effect)
            self._carry_out_ready()
        except OSError as error:
            self._fail(error)
        if self._waiting:
            self._unsynced.set()
        return self._submitted

    def _append(self, effect: Effect | int) -> None:
        self._submitted += 1
        if not self._closed:
            self._waiting.append(effect)

    def _write(self, record: WriteJournal) -> int:
        if not self._closed:
            self.journal.append(record.kind, **record.fields)
        return self.journal.written

    def _carry_out_ready(self) -> None:
        """Carry out effects up to the first record that is not on disk."""
        if self._carrying_out:  # an effect was submitted while another is carried out: it comes after that one
            return
        self._carrying_out = True
        try:
            while self._waiting:
                effect = self._waiting[0]
                if isinstance(effect, int) and effect > self.journal.synced:
                    break
                self._waiting.popleft()
                if not isinstance(effect, int):
                    self.carry_out(effect)
                if not self._closed:
                    self._done += 1
        finally:
            self._carrying_out = False

    def _fail(self, error: OSError) -> None:
        self.close()
        self.on_file_error(error)

    def will_start_on(self, lease: uuid.UUID) -> bool:
        """Return whether a task on a lease is to start that waits for a record."""
        return any(isinstance(effect, StartTask) and effect.task.lease.id == lease for effect in self._waiting)

    def close(self) -> None:
        """Drop the effects that wait, and all that come later."""
        self._closed = True
        self._waiting.clear()
        self._unsynced.set()
        self._progress.set()

    async def wait(self, ticket: int) -> bool:
        """Wait until everything up to a ticket is carried out; return False if it was dropped."""
        while self._done < ticket and not self._closed:
            await self._progress.wait()
        return self._done >= ticket

    async def run(self) -> None:
        """Sync records to disk and carry out what follows them, until cancelled or closed."""
        while not self._closed:
            if not self._waiting:
                await self._unsynced.wait()
            self._unsynced = anyio.Event()
            try:
                await self.journal.sync()
                self._carry_out_ready()
            except OSError as error:
                self._fail(error)
            self._progress.set()
            self._progress = anyio.Event()
