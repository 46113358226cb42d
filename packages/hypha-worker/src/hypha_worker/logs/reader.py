"""Finding and reading the logs of runs, for ``hypha-worker logs``, whether the worker runs or not."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Final

from hypha_worker.logs.run_log import SUFFIX, find_logs, has_ended, older_half

_BLOCK: Final = 1 << 16


class LogNotFoundError(Exception):
    """No log, or no single one, is meant.

    Attributes:
        matches: those that may be meant.
    """

    def __init__(self, message: str, matches: Sequence[StoredLog]) -> None:
        super().__init__(message)
        self.matches = matches


@dataclass(frozen=True, slots=True)
class StoredLog:
    """The log of one run."""

    path: Path
    written: float
    """Time of the last output, Unix seconds."""

    def __str__(self) -> str:
        return f"{self.job}/{self.run}"

    @property
    def job(self) -> str:
        """Id of its job."""
        return self.path.parent.name

    @property
    def run(self) -> str:
        """Its lease or task, and where that had several runs, ``@`` and the number from the second one on."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def name(self) -> str:
        """Its lease or task."""
        return self.run.partition("@")[0]

    @property
    def number(self) -> str:
        """Number of the run among those of this name."""
        return self.run.partition("@")[2] or "1"

    @property
    def has_ended(self) -> bool:
        """Whether its run is over."""
        return has_ended(self.path)


def list_logs(folder: Path) -> list[StoredLog]:
    """Return all logs in a folder of logs, the one with the latest output last.

    Raises:
        OSError: the folder cannot be read.
    """
    return _stored(find_logs(folder))


def list_job_logs(folder: Path, job_id: uuid.UUID) -> list[StoredLog]:
    """Return the logs of one job, the one with the latest output last."""
    return _stored((folder / str(job_id)).glob(f"*{SUFFIX}"))


def _stored(paths: Iterable[Path]) -> list[StoredLog]:
    found: list[StoredLog] = []
    for path in paths:
        with suppress(FileNotFoundError):  # removed meanwhile
            found.append(StoredLog(path, path.stat().st_mtime))
    return sorted(found, key=lambda log: (log.written, log.path))


def find_log(folder: Path, wanted: str) -> StoredLog:
    """Return the log that is meant: of several runs of a lease or task the latest.

    Args:
        folder: of logs.
        wanted: a job's id or the beginning of it, optionally followed by ``/`` and a lease or task, or its beginning,
            and that by ``@`` and the number of a run.

    Raises:
        LogNotFoundError: none or several are meant.
        OSError: the folder cannot be read.
    """
    job, _, run = wanted.partition("/")
    known = list_logs(folder)
    found = _prefer_equal([log for log in known if log.job.startswith(job)], lambda log: log.job == job)
    name, _, number = run.partition("@")
    found = _prefer_equal([log for log in found if log.name.startswith(name)], lambda log: log.name == name)
    found = [log for log in found if number in ("", log.number)]
    if not found:
        there = f"; {folder} has these:" if known else f", nor of any other job, in {folder}"
        raise LogNotFoundError(f"there is no log of {wanted!r}{there}", known)
    if len({(log.job, log.name) for log in found}) > 1:
        raise LogNotFoundError(f"{wanted!r} means several logs: name one of them", found)
    return found[-1]


def _prefer_equal(logs: list[StoredLog], is_equal: Callable[[StoredLog], bool]) -> list[StoredLog]:
    return list(filter(is_equal, logs)) or logs


def read_log(path: Path, tail: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a log, the last ones if `tail` is their number."""
    with open_or_empty(older_half(path)) as older, open_or_empty(path) as newer:
        lines = chain(_lines(older), _lines(newer))
        yield from lines if tail is None else deque(lines, maxlen=tail)


def follow_log(path: Path, wait: Callable[[], None], tail: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a log as `read_log` does, then further output as it comes, until the run has ended.

    Args:
        path: the log.
        wait: waits a moment for further output.
        tail: number of lines to begin with; all if None.
    """
    with open_or_empty(older_half(path)) as older:
        file = open_or_empty(path)
        lines = chain(_lines(older), _lines(file))
        yield from lines if tail is None else deque(lines, maxlen=tail)
    try:
        while True:
            is_last = has_ended(path)
            while block := file.read(_BLOCK):
                yield block
            if _is_replaced(file, path):
                file.close()
                file = open_or_empty(path)
            elif is_last:
                return
            else:
                wait()
    finally:
        file.close()


def _is_replaced(file: FileIO, path: Path) -> bool:
    """Return whether a newer file has taken the place of an open one, which holds the older half by now."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:  # it was removed, or its successor is not there yet
        return False


def open_or_empty(path: Path) -> FileIO:
    """Open a file; one that does not exist is empty."""
    try:
        return FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except FileNotFoundError:
        return FileIO(os.devnull)


def _lines(file: FileIO) -> Iterator[bytes]:
    pending = b""
    while block := file.read(_BLOCK):
        *lines, pending = (pending + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if pending:
        yield pending
