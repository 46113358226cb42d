"""Catalogue of the jobs in an output directory: their names and states, from the beginnings and ends of their events.

Files are only read, and a bounded part of each.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from hypha_proto.record_file import EVENTS, read_ends
from hypha_proto.texts import shorten

MAX_JOBS: Final = 1000
"""Jobs that are listed, the newest first."""
_ENDS: Final = frozenset({"finished", "failed", "interrupted"})
ACTIVE: Final = frozenset({"waiting", "running"})
"""States of a job that has not ended."""
_BEGINS: Final = frozenset({"accepted", "resumed", "queued"})


class JobEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as ``jobs`` and ``status`` show it."""

    job_id: str
    state: str
    """``waiting``, ``running``, ``finished``, ``failed``, ``cancelled`` or ``interrupted``."""
    directory: str
    name: str | None = None
    type: str | None = None
    submitted: float | None = None
    """Seconds since the Unix epoch."""
    ended: float | None = None
    reason: str | None = None
    """Why it waits, failed or was interrupted."""


def read_entry(directory: Path) -> JobEntry | None:
    """Return the job of a directory that no scheduler runs now; None if it is no job's."""
    try:
        begin, end = read_ends(directory / EVENTS)
    except OSError:
        return None
    first: dict[str, Any] = next((event for event in begin if event.get("event") in _BEGINS), {})
    last: dict[str, Any] = next((event for event in reversed(end) if event.get("event") in _BEGINS | _ENDS), {})
    kind = str(last.get("event"))
    has_end = kind in _ENDS
    state = "cancelled" if last.get("cancelled") is True else kind if has_end else "interrupted"
    return JobEntry(
        directory.name,
        state,
        str(directory),
        name=_text(first.get("name")),
        type=_text(first.get("type")),
        submitted=_number(first.get("time")),
        ended=_number(last.get("time")) if has_end else None,
        reason=_text(last.get("error") or last.get("reason")) if has_end else "its scheduler has ended",
    )


def list_directories(runs: Path) -> list[Path]:
    """Return the directories of jobs, the one that was written last first."""
    try:
        found = [path for path in runs.iterdir() if _is_job_id(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=_written_at, reverse=True)


def list_jobs(runs: Path, active: Mapping[str, JobEntry], *, ended: bool) -> list[JobEntry]:
    """Return the jobs that wait or run, in their order, and with `ended` also the others, the newest first."""
    others = _ended_jobs(runs, active) if ended else iter(())
    return [*active.values(), *(entry for entry, _ in zip(others, range(MAX_JOBS), strict=False))]


def _ended_jobs(runs: Path, active: Iterable[str]) -> Iterator[JobEntry]:
    known = set(active)
    for directory in list_directories(runs):
        if directory.name not in known and (entry := read_entry(directory)) is not None:
            yield entry


def find_jobs(runs: Path, active: Mapping[str, JobEntry], wanted: str) -> list[JobEntry]:
    """Return the jobs that `wanted` names: by their name, or by the beginning of their name or id.

    A complete id, in any case of its letters, names one job, whatever the names of others are; a complete name stands
    for no longer name. Of those that have ended, the newest `MAX_JOBS` are found by their name.
    """
    prefix = wanted.lower()
    exact = active.get(prefix) or (read_entry(runs / prefix) if _is_job_id(prefix) else None)
    if exact is not None:
        return [exact]
    found = [entry for entry in active.values() if _matches(entry, wanted, prefix)]
    for number, directory in enumerate(path for path in list_directories(runs) if path.name not in active):
        if number < MAX_JOBS or directory.name.startswith(prefix):
            entry = read_entry(directory)
            found += [] if entry is None or not _matches(entry, wanted, prefix) else [entry]
    is_name = any(entry.name == wanted for entry in found)
    return [entry for entry in found if not is_name or entry.name == wanted or entry.job_id.startswith(prefix)]


def _matches(entry: JobEntry, wanted: str, prefix: str) -> bool:
    return bool(prefix) and ((entry.name or "").startswith(wanted) or entry.job_id.startswith(prefix))


def _is_job_id(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def _written_at(directory: Path) -> float:
    try:
        return (directory / EVENTS).stat().st_mtime
    except OSError:
        return 0.0


def _text(value: object) -> str | None:
    return shorten(value, 400) if isinstance(value, str) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
