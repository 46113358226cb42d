"""Files with the output of executors' processes, one for each run, bounded in size and number.

``logs/<job>/<lease or task>.log`` in the work directory, outside the folders of jobs; a further run of the same name is
``<name>@2.log`` and so on. The file of a run is locked while the run goes on, so that others see whether it has ended,
also after its worker was killed.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

LOGS: Final = "logs"
"""Folder in the work directory."""
SUFFIX: Final = ".log"
OLDER: Final = ".1"
"""Ending of the file with the older half of a log."""
ORIGIN: Final = ".origin"
"""Ending of the file that says for whom a run was started, and how many bytes of its log were removed."""
_NEW: Final = ".new"
_OPEN: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """For whom a run was started."""

    scheduler: PeerId
    dropped: int = 0
    """Bytes that the run has printed and that are not in its log any more."""


class LogFolder:
    """The logs of all runs of a worker. Removes the oldest ones of those that have ended."""

    def __init__(self, folder: Path, max_size: int, keep: int) -> None:
        """Prepare; nothing is removed before `open`, and the folder is created with the first log.

        Args:
            folder: where they lie.
            max_size: bytes of one run's log.
            keep: number of ended runs whose logs are kept.
        """
        self.folder = folder
        self.max_size = max_size
        self._keep = keep
        self._ended: deque[Path] = deque()
        """Logs of runs that have ended, the oldest first."""

    def open(self) -> None:
        """Remove logs of earlier workers that are too many. A failure is logged only."""
        try:
            found = sorted((path.stat().st_mtime_ns, path) for path in find_logs(self.folder))
            self._ended.extend(path for _, path in found if has_ended(path))
            self._remove_oldest()
        except OSError as error:
            _log.warning("logs of earlier jobs cannot be looked at, they stay: %s", error)

    def new_log(self, job_id: uuid.UUID, name: str, scheduler: PeerId | None = None) -> RunLog:
        """Return the log of a run, which is created when it is entered.

        Args:
            job_id: the job.
            name: a lease or a task; a valid file name.
            scheduler: who may read it, besides the owner.
        """
        return RunLog(self, self.folder / str(job_id), name, scheduler)

    def ended(self, path: Path) -> None:
        """Note the end of a run; remove the log of the one that ended first, if there are too many."""
        self._ended.append(path)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        while len(self._ended) > self._keep:
            path = self._ended.popleft()
            for each in (_unfinished(path), older_half(path), origin_file(path), path):
                each.unlink(missing_ok=True)
            with suppress(OSError):  # other runs of the job have logs
                path.parent.rmdir()


class RunLog:
    """The log of one run, as a context. No failure to write it is raised: a job goes on without."""

    def __init__(self, logs: LogFolder, folder: Path, name: str, scheduler: PeerId | None = None) -> None:
        self._logs = logs
        self._folder = folder
        self._name = name
        self.path = folder / f"{name}{SUFFIX}"
        """The file; which one of its name is known when the context is open."""
        self._origin = None if scheduler is None else LogOrigin(scheduler)
        self._older_size = 0
        self._descriptor: int | None = None
        self._size = 0
        self._has_failed = False

    @property
    def is_complete(self) -> bool:
        """Whether everything that was written is there, or was until newer output took its place."""
        return not self._has_failed

    def __enter__(self) -> Self:
        try:
            self._create()
        except OSError as error:
            self._fail(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            with suppress(OSError):
                self._logs.ended(self.path)

    def write(self, data: bytes) -> None:
        """Append output."""
        if self._descriptor is None:
            return
        try:
            while data:
                part = data[: self._part_length(data)]
                if part:
                    self._append(part)
                    data = data[len(part) :]
                else:
                    self._rotate()
        except OSError as error:
            self._fail(error)

    def _part_length(self, data: bytes) -> int:
        """Return how many bytes still fit into this half of the log: whole lines, or a part of one that is too long."""
        room = max(1, self._logs.max_size // 2) - self._size
        if len(data) <= room:
            return len(data)
        whole_lines = data.rfind(b"\n", 0, max(0, room)) + 1
        return whole_lines or (0 if self._size else room)

    def _create(self) -> None:
        if not self._folder.is_dir():
            for folder in (self._logs.folder, self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        for number in itertools.count(1):
            path = self._folder / (f"{self._name}@{number}{SUFFIX}" if number > 1 else f"{self._name}{SUFFIX}")
            try:
                self._descriptor = _open_locked(path, os.O_EXCL)
            except FileExistsError:
                continue
            self.path = path
            self._write_origin()
            return

    def _rotate(self) -> None:
        """Keep what was written as the older half. The file at `path` is always a locked one."""
        new = _unfinished(self.path)
        descriptor = _open_locked(new, os.O_TRUNC)
        try:
            with suppress(FileNotFoundError):  # an earlier attempt has failed in between
                os.rename(self.path, older_half(self.path))
            os.rename(new, self.path)
        except OSError:
            os.close(descriptor)
            raise
        assert self._descriptor is not None
        os.close(self._descriptor)
        dropped, self._older_size = self._older_size, self._size
        self._descriptor, self._size = descriptor, 0
        if self._origin is not None:
            self._origin = LogOrigin(self._origin.scheduler, self._origin.dropped + dropped)
            self._write_origin()

    def _write_origin(self) -> None:
        if self._origin is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(origin_file(self.path), flags, 0o600)
        try:  # in place, by one call: a later text is never shorter
            os.write(descriptor, f"{self._origin.scheduler} {self._origin.dropped}\n".encode())
        finally:
            os.close(descriptor)

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(data)
        while rest:
            written = os.write(self._descriptor, rest)
            self._size += written
            rest = rest[written:]

    def _fail(self, error: OSError) -> None:
        """Log once that output is lost; later output is written if that is possible again."""
        if not self._has_failed:
            _log.warning("output is missing in %s: %s", self.path, error.strerror or error)
        self._has_failed = True


def older_half(path: Path) -> Path:
    """Return the file with the older half of a log."""
    return path.with_name(f"{path.name}{OLDER}")


def origin_file(path: Path) -> Path:
    """Return the file that says for whom the run of a log was started."""
    return path.with_name(f"{path.name}{ORIGIN}")


def read_origin(path: Path) -> LogOrigin | None:
    """Return for whom the run of a log was started; None if that is not known."""
    try:
        scheduler, dropped = origin_file(path).read_text(encoding="ascii").split()
        return LogOrigin(PeerId.parse(scheduler), int(dropped))
    except (FileNotFoundError, ValueError, InvalidIdError):
        return None


def _unfinished(path: Path) -> Path:
    """Return the file that is about to take the place of a log."""
    return path.with_name(f"{path.name}{_NEW}")


def find_logs(folder: Path) -> Iterator[Path]:
    """Yield the log of each run in a folder of logs, in no order."""
    yield from folder.glob(f"*/*{SUFFIX}")


def has_ended(path: Path) -> bool:
    """Return whether the run that wrote a log is over, or its worker."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open_locked(path: Path, flags: int) -> int:
    descriptor = os.open(path, _OPEN | flags, 0o600)
    with suppress(OSError):  # a file system without locks: the run seems to have ended
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
