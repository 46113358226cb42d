"""The storage, threads and traffic of one task: all bytes of its folders together stay within its lease.

What an executor's own processes write is counted when the next file is announced, which a task that has used up its
storage does not get, and regularly by `TaskStorage.watch`, which ends the task.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from hypha_net.connectors.content import CachedVersion, ContentStorage
from hypha_net.transfer import FilePushTarget
from hypha_worker.content_cache import SchedulerCache
from hypha_worker.errors import ExecutionError, StorageExceededError
from hypha_worker.openat import open_root, walk
from hypha_worker.task_files import TaskFiles

DEFAULT_STORAGE: Final = 10.0
"""GB of a task whose lease states none."""
MAX_ENTRIES: Final = 100_000
"""Files and folders of a work directory that are looked at; with more the task gets no further file."""
MAX_PATH: Final = 4096
"""Characters of a path in a work directory; a task with longer ones gets no further file."""
MAX_TRANSFERS: Final = 8
"""Fetches of one task that run at once; further ones wait."""
_THREADS: Final = 8
_OWN_FILES: Final = 1_000_000
"""Bytes in the work directory that are not counted against a task while it runs: its specification, above all."""
_WATCH_INTERVAL: Final = 0.5
"""Seconds between two looks at a work directory, at least."""
_WATCH_SHARE: Final = 20
"""The pause is that many times as long as the look has taken, up to `_LONGEST_WATCH_INTERVAL`."""
_LONGEST_WATCH_INTERVAL: Final = 30.0
_BLOCK: Final = 512
"""Bytes in the unit of `st_blocks`, on every file system."""

T = TypeVar("T")


@dataclass(slots=True)
class TaskTraffic:
    """Bytes of complete files, without what the protocols add."""

    sent: int = 0
    """Of pushes, to each peer; repeated ones included."""
    received: int = 0
    """Of pushes, pulls and downloads."""

    def counting(self, target: FilePushTarget) -> FilePushTarget:
        """Return a push target that also counts what it receives."""

        async def on_complete(size: int, digest: str) -> None:
            self.received += size
            await target.on_complete(size, digest)

        return replace(target, on_complete=on_complete)


class TaskStorage(ContentStorage):
    """Counts the bytes of one task, announced and present; implements `hypha_net.transfer.StorageQuota`.

    Its threads and places are the task's own, so that no other task waits for its transfers.
    """

    def __init__(self, work_dir: Path, limit: int, cache: SchedulerCache | None = None) -> None:
        """Prepare; `work_dir` need not exist yet.

        Args:
            work_dir: the task's folder.
            limit: bytes that the task may store in it.
            cache: what keeps fetched content for further tasks, if the owner wants it.
        """
        self.cache: Final = cache
        self.limit = limit
        self.traffic: Final = TaskTraffic()
        """What is sent and received for the task."""
        self.files: Final = TaskFiles(work_dir)
        self.transfers = anyio.CapacityLimiter(MAX_TRANSFERS)
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._lock = threading.Lock()
        self._reservations: dict[Path, int] = {}
        self._present = 0
        """Bytes of the files without a reservation, when they were last looked at."""

    async def run(self, function: Callable[..., T], *arguments: object, abandon: bool = False) -> T:
        """Call a blocking function in one of the task's threads.

        Args:
            function: what to call.
            arguments: its arguments.
            abandon: do not wait for the thread when the caller is cancelled; it may finish on deleted files.
        """
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads, abandon_on_cancel=abandon)

    def find_cached_version(self, kind: str, source: str) -> CachedVersion | None:
        """Return what a source had when it was fetched, if that is still in the cache."""
        return None if self.cache is None else self.cache.cache.find(self.cache.key(kind, source))

    async def take_cached_version(self, kind: str, source: str, target: Path) -> int | None:
        """Copy a source's content, as it was when fetched, from the cache to a new staged file.

        Returns:
            The size of the content in bytes; None if the cache does not have it.

        Raises:
            StorageExceededError: the task's files would exceed its limit.
            OSError: it cannot be written.
        """
        if self.cache is None:
            return None
        try:
            return await self.run(self.cache.cache.take, self.cache.key(kind, source), target, self.reserve)
        finally:
            self.release(target)

    async def put_cached_version(self, kind: str, source: str, path: Path, found: CachedVersion) -> None:
        """Add a complete staged file to the cache as what a source has now; what goes wrong there is logged."""
        if self.cache is not None:
            key = self.cache.key(kind, source)
            await self.run(self.cache.cache.put, key, path, found.digest, found.version)

    async def watch(self) -> None:
        """Look at the work directory until cancelled, and end the task if its processes have written too much.

        Space on the disk counts, so that a sparse file takes what it has. Files that are open but have no name any
        more are not seen.

        Raises:
            ExecutionError: the task stores more than its lease allows.
        """
        pause = 0.0
        while True:
            await anyio.sleep(min(max(_WATCH_INTERVAL, pause), _LONGEST_WATCH_INTERVAL))
            started = time.monotonic()
            # a thread of its own: it must not wait for the task's transfers
            used = await anyio.to_thread.run_sync(self._measure_space, limiter=anyio.CapacityLimiter(1))
            if used > self.limit + _OWN_FILES:
                raise ExecutionError(
                    f"the job stores {used} bytes, more than the {self.limit} of its lease (storage): request more, or "
                    "raise [resources.default] storage of this worker"
                )
            pause = _WATCH_SHARE * (time.monotonic() - started)

    def _measure_space(self) -> int:
        try:
            return self._measure(set(), space=True)
        except StorageExceededError as error:
            raise ExecutionError(str(error)) from None

    def reserve(self, path: Path, size: int) -> None:
        """See `StorageQuota.reserve`; `path` may also be a folder, for all files in it.

        Looks at the work directory when `path` is new, or the storage is used up.

        Raises:
            StorageExceededError: the task's files would exceed its limit.
        """
        with self._lock:
            before = self._reservations.get(path)
            announced = sum(self._reservations.values()) - (before or 0)
            if before is None or self._present + announced + size > self.limit:
                self._present = self._measure({path, *self._reservations})
            used = self._present + announced
            if used + size > self.limit:
                raise StorageExceededError(
                    f"a file of {size} bytes exceeds this job's storage: {used} of {self.limit} bytes are used; "
                    "request more storage for the job, or raise [resources.default] storage of this worker"
                )
            self._reservations[path] = size

    def release(self, path: Path) -> None:
        """See `StorageQuota.release`."""
        with self._lock:
            self._present += self._reservations.pop(path, 0)  # until it is looked at

    def _measure(self, reserved: Set[Path], *, space: bool = False) -> int:
        """Return the bytes of all files of the task but those in `reserved`; links are not followed.

        An incomplete file (hidden, ``.part``) counts with the space that it has, which is less than its length where
        a transfer broke off; with `space`, every file does.
        """
        total = count = 0
        seen: set[tuple[int, int]] = set()
        for is_staged, path, about in self._walk(reserved):
            count += 1
            if count > MAX_ENTRIES:
                raise StorageExceededError(f"the job's work directory holds more than {MAX_ENTRIES} files")
            if len(path) > MAX_PATH:
                raise StorageExceededError("the job's folders are nested deeper than a path may be long")
            if stat.S_ISDIR(about.st_mode):
                continue
            key = about.st_dev, about.st_ino
            if key in seen:
                continue
            if is_staged or about.st_nlink > 1:  # a staged file may be published meanwhile, and be met again
                seen.add(key)
            total += _size(path, about, space=space)
        return total

    def _walk(self, reserved: Set[Path]) -> Iterator[tuple[bool, str, os.stat_result]]:
        """Yield everything in the staging folder, then in the task's, but for what is reserved."""
        names = {str(path) for path in reserved}
        with suppress(FileNotFoundError), open_root(self.files.staging) as folder:  # there is none before it is needed
            for path, about in walk(folder, "", lambda path: f"{self.files.staging}/{path}" in names):
                yield True, path, about
        with suppress(FileNotFoundError):  # the task has not begun
            for path, about in self.files.walk("", lambda path: f"{self.files.work_dir}/{path}" in names):
                yield False, path, about


def _size(path: str, about: os.stat_result, *, space: bool) -> int:
    """Return the bytes of a file; with `space`, those that it takes on the disk."""
    name = path.rpartition("/")[2]
    if space or (name.startswith(".") and name.endswith(".part")):
        return min(about.st_size, about.st_blocks * _BLOCK)
    return about.st_size
