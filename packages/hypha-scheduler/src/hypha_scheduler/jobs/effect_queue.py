"""Carries out the effects of an operator in their order; journal records are on disk before what follows them.

A record is written when it is submitted; all records that are not yet on disk are synced together. Without a record
nothing waits: the effects are carried out before `submit` returns. While the disk has no room for a record or an event,
it and all that follow wait.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_scheduler.errors import lacks_room
from hypha_scheduler.jobs.journal import Journal, check_names
from hypha_scheduler.strategies.base import Effect, Effects, StartTask, WriteJournal

ROOM_INTERVAL: Final = 2.0
"""Seconds between attempts to write to a disk without room."""


@dataclass(frozen=True, slots=True)
class _Note:
    """Record of the runner, for which nothing waits."""

    kind: str
    fields: Mapping[str, object]


@dataclass(slots=True)
class EffectQueue:
    """Effects of one job that are not yet carried out."""

    journal: Journal
    carry_out: Callable[[Effect], None]
    """Carries out any effect but `WriteJournal`, without waiting."""
    on_file_error: Callable[[OSError], None]
    """Called when a file cannot be written; the effects that wait for it are dropped, and all that come later."""
    on_full: Callable[[OSError], None] = lambda error: None
    """Called when the disk has no room, and nothing is carried out until it has."""
    on_room: Callable[[], None] = lambda: None
    """Called when the disk has room again."""
    _unwritten: deque[Effect | _Note] = field(default_factory=deque)
    """Effects whose records are not written yet: one of them, at least, found no room."""
    _waiting: deque[Effect | int] = field(default_factory=deque)
    """Effects, and the numbers of the records that must be on disk before those after them."""
    is_full: bool = False
    """Whether the disk had no room at the last attempt."""
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
        self._submitted += len(effects)
        self._take(effects)
        return self._submitted

    def note(self, kind: str, fields: Mapping[str, object], *, syncs: bool = False) -> None:
        """Write a record of the runner, for which nothing waits.

        With `syncs` it is synced to disk in the background, otherwise with the next record that is.
        """
        self._submitted += 1
        self._take((_Note(kind, fields),))
        if syncs:
            self._unsynced.set()

    def _take(self, effects: Sequence[Effect | _Note]) -> None:
        if self._closed:
            return
        self._unwritten.extend(effects)
        if not self.is_full:
            self._advance()
        if self._waiting or self._unwritten:
            self._unsynced.set()

    def _advance(self) -> None:
        """Write records and carry out what is ready, as far as the disk has room."""
        was_full, self.is_full = self.is_full, False
        try:
            self._write_records()
            self._carry_out_ready()
        except OSError as error:
            self._on_error(error, was_full)
        else:
            if was_full:
                self.on_room()

    def _on_error(self, error: OSError, was_full: bool = False) -> None:
        if not lacks_room(error):
            self._fail(error)
            return
        self.is_full = True
        if not was_full:
            self.on_full(error)

    def _write_records(self) -> None:
        while self._unwritten:
            effect = self._unwritten[0]
            try:
                entry = self._write(effect) if isinstance(effect, WriteJournal | _Note) else effect
            except (TypeError, ValueError):
                self._unwritten.clear()
                raise
            self._unwritten.popleft()
            self._waiting.append(entry)

    def _write(self, record: WriteJournal | _Note) -> int:
        """Write a record; return the number of the record that must be on disk before what follows."""
        if isinstance(record, WriteJournal):
            check_names(record.kind, record.fields)
        self.journal.append(record.kind, **record.fields)
        return self.journal.written if isinstance(record, WriteJournal) else 0

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
                    self._carry_out(effect)
                if not self._closed:
                    self._done += 1
        finally:
            self._carrying_out = False

    def _carry_out(self, effect: Effect) -> None:
        try:
            self.carry_out(effect)
        except OSError as error:
            if lacks_room(error):
                self._waiting.appendleft(effect)
            raise

    def _fail(self, error: OSError) -> None:
        self.close()
        self.on_file_error(error)

    def will_start_on(self, lease: uuid.UUID) -> bool:
        """Return whether a task on a lease is to start that waits for a record."""
        waiting = (*self._waiting, *self._unwritten)
        return any(isinstance(effect, StartTask) and effect.task.lease.id == lease for effect in waiting)

    def close(self) -> None:
        """Drop the effects that wait, and all that come later."""
        self._closed = True
        self._waiting.clear()
        self._unwritten.clear()
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
            if self.is_full:
                await anyio.sleep(ROOM_INTERVAL)
            elif not self._waiting:
                await self._unsynced.wait()
            self._unsynced = anyio.Event()
            try:
                await self.journal.sync()
            except OSError as error:
                self._fail(error)
            self._advance()
            self._progress.set()
            self._progress = anyio.Event()
