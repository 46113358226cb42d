"""The record of a job's end, which is written as soon as the disk has room for it.

`runner` writes the end of a job. While its files cannot be written, `EndRecorder` tries again in the background, so
that the submitter hears of the end at once. Started by `service`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_scheduler.jobs.event_file import EVENTS, EventFile
from hypha_scheduler.jobs.journal import JOURNAL, Journal

_log = logging.getLogger(__name__)

RETRY_INTERVAL: Final = 2.0
"""Seconds between two attempts to record an end."""
RETRY_LIMIT: Final = 3600.0
"""Seconds after which the end of a job stays unrecorded."""


@dataclass(slots=True)
class EndRecord:
    """How a job ended, and which of its files do not say so yet."""

    directory: Path
    kind: str
    """``finished``, ``failed`` or ``interrupted``."""
    record: Mapping[str, object]
    """Fields of the journal's record."""
    event: Mapping[str, object]
    """Fields of the event."""
    time: float = field(default_factory=lambda: round(time.time(), 3))
    """Seconds since the Unix epoch."""
    _in_journal: bool = False
    _in_events: bool = False

    def write(self) -> None:
        """Write the record and the event, each once.

        Raises:
            OSError: one of them could not be written; a further call writes what is missing.
        """
        if not self._in_events:
            with EventFile(self.directory / EVENTS) as events:
                events.write(self.kind, self.time, **self.event)
            self._in_events = True
        if not self._in_journal:
            with Journal(self.directory / JOURNAL) as journal:
                journal.record(self.kind, **{**self.record, "time": self.time})
            self._in_journal = True


@dataclass(slots=True)
class EndRecorder:
    """Ends of jobs that could not be written yet."""

    limit: float = RETRY_LIMIT
    """Seconds after which an end is given up."""
    _pending: dict[Path, tuple[EndRecord, float]] = field(default_factory=dict)
    """Ends by directory, with the time at which each is given up."""
    _added: anyio.Event = field(default_factory=anyio.Event)

    def record(self, end: EndRecord) -> None:
        """Write an end, now or, if that fails, in the background."""
        try:
            end.write()
        except OSError as error:
            _log.error("the end of a job is not recorded: %s; trying again for %g s", error, self.limit)
            self._pending[end.directory] = (end, anyio.current_time() + self.limit)
            self._added.set()

    async def run(self) -> None:
        """Write what could not be written, until cancelled."""
        try:
            while True:
                await self.drain(float("inf"))
                self._added = anyio.Event()
                await self._added.wait()
        finally:
            self._try_all()
            for directory in self._pending:
                _log.error("the end of the job in %s stays unrecorded: the scheduler ends", directory)

    async def drain(self, seconds: float) -> None:
        """Try until every end is written or given up, for at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self._pending:
                await anyio.sleep(RETRY_INTERVAL)
                self._try_all()

    def _try_all(self) -> None:
        for end, until in list(self._pending.values()):
            try:
                end.write()
            except OSError as error:
                if anyio.current_time() < until:
                    continue
                _log.error("the end of a job stays unrecorded after %g s: %s", self.limit, error)
            else:
                _log.info("the end of the job in %s is recorded", end.directory)
            del self._pending[end.directory]
