"""The worker's cache of fetched content, by digest, bounded in bytes; the least recently used is evicted.

Its files belong to the worker alone. A job gets a copy, which shares its blocks where the file system can (reflink),
and never a link, so that it cannot change what another job gets; each copy is verified. What the jobs of one
scheduler have fetched is handed to its own jobs only: to know a digest is no right to the content.

Layout: ``objects/<algorithm>-<hex>``, whose modification time is that of the last use; ``keys/<hash>``, which names an
object and the version of a source that had it; ``incoming``, for incomplete files. The methods block, and may be called
in any thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from hypha_net import instrumentation
from hypha_net.connectors.content import CachedVersion
from hypha_worker.file_copy import copy_range, hash_file

_log = logging.getLogger(__name__)

DIGEST: Final = "digest"
"""Kind of source of content that is found by its digest."""
_OBJECT: Final = re.compile(r"(sha256|blake3)-[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"(sha256|blake3):[0-9a-f]{64}")
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_HITS: Final = instrumentation.Counter("hypha.worker.cache.hits", "{file}", "Files that jobs got from the cache.")
_HIT_BYTES: Final = instrumentation.Counter("hypha.worker.cache.io", "By", "Bytes that jobs got from the cache.")
_EVICTED: Final = instrumentation.Counter("hypha.worker.cache.evictions", "{file}", "Files that left the cache.")
_SIZE: Final = instrumentation.Level("hypha.worker.cache.size", "By", "Bytes in the cache.")


class CacheError(Exception):
    """The cache's folder cannot be used; the message names it and a remedy."""


@dataclass(slots=True)
class _Key:
    object: str
    version: str


class ContentCache:
    """The cache of one worker."""

    def __init__(self, folder: Path, max_size: int) -> None:
        """Prepare; `open` makes the folders and reads what is there.

        Args:
            folder: where it is; no other worker may use it at the same time.
            max_size: bytes of all files together.
        """
        self.folder = folder
        self.max_size = max_size
        self._objects: OrderedDict[str, int] = OrderedDict()
        """Sizes; the least recently used first."""
        self._keys: dict[str, _Key] = {}
        self._total = 0
        self._lock = threading.Lock()
        self._lock_file: int | None = None

    # ------------------------------------------------------------------------------------------------------- lifetime

    def open(self) -> None:
        """Make the folders, lock them, and read what an earlier run has left.

        Raises:
            CacheError: the folder cannot be used, or another worker uses it.
        """
        try:
            self._make_folders()
            self.folder.chmod(0o700)
            self._take_lock()
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._make_folders()
            self._read()
        except OSError as error:
            self.close()
            raise CacheError(
                f"cache.path {self.folder}: {error.strerror}: name a folder of the worker's own"
            ) from error

    def close(self) -> None:
        """Let another worker use the folder."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _make_folders(self) -> None:
        for folder in (self.folder, self._objects_folder, self._keys_folder, self._incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _take_lock(self) -> None:
        self._lock_file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CacheError(
                f"cache.path {self.folder} is used by another worker: give each worker a folder of its own"
            ) from None

    def _read(self) -> None:
        found = []
        for entry in os.scandir(self._objects_folder):
            about = entry.stat(follow_symlinks=False)
            if _OBJECT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                found.append((about.st_mtime_ns, entry.name, about.st_size))
        for _, name, size in sorted(found):
            self._objects[name] = size
            self._total += size
        for entry in os.scandir(self._keys_folder):
            self._read_key(Path(entry.path))
        with self._lock:
            self._make_room(0)

    def _read_key(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text("utf-8"))
            name, version = found["object"], found["version"]
        except (OSError, ValueError, KeyError, TypeError):
            name = version = ""
        if _KEY.fullmatch(path.name) and isinstance(version, str) and name in self._objects:
            self._keys[path.name] = _Key(name, version)
        else:
            path.unlink(missing_ok=True)

    @property
    def _objects_folder(self) -> Path:
        return self.folder / "objects"

    @property
    def _keys_folder(self) -> Path:
        return self.folder / "keys"

    @property
    def _incoming(self) -> Path:
        return self.folder / "incoming"

    # ---------------------------------------------------------------------------------------------------------- content

    def find(self, key: str) -> CachedVersion | None:
        """Return what a source had when it was fetched, if that is still here."""
        with self._lock:
            found = self._keys.get(key)
            return None if found is None else CachedVersion(found.object.replace("-", ":", 1), found.version)

    def take(self, key: str, target: Path, reserve: Callable[[Path, int], None]) -> int | None:
        """Copy what a key stands for to a new file, and verify it; return its size, or None if it is not here.

        Args:
            key: from `SchedulerCache`.
            target: the copy.
            reserve: called with target and size before a byte is written.

        Raises:
            OSError: the copy cannot be written.
        """
        with self._lock:
            found = self._keys.get(key)
            file = None if found is None else self._open_object(found.object)
        if found is None or file is None:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            reserve(target, size)
            try:
                is_intact = _copy_verified(file, target, size, found.object)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        if not is_intact:
            _log.warning("cache: %s is damaged and is removed", self._objects_folder / found.object)
            target.unlink(missing_ok=True)
            with self._lock:
                self._remove(found.object)
            return None
        _HITS.add(1)
        _HIT_BYTES.add(size)
        return size

    def _open_object(self, name: str) -> FileIO | None:
        path = self._objects_folder / name
        try:
            file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            os.utime(path)
        except OSError as error:
            _log.warning("cache: %s cannot be used: %s", path, error.strerror)
            self._remove(name)
            return None
        self._objects.move_to_end(name)
        return file

    def put(self, key: str, source: Path, digest: str, version: str = "") -> None:
        """Add a complete and verified file under a key; if it cannot be added, that is logged, and it is left out.

        Args:
            key: from `SchedulerCache`.
            source: the file, which no job can reach.
            digest: its digest.
            version: version of the source that has it.
        """
        if not _DIGEST.fullmatch(digest):
            return
        name = digest.replace(":", "-", 1)
        try:
            self._make_folders()  # another process may have cleared the cache
            if not self._add_object(name, source):
                return
            with self._lock:
                self._add_key(key, _Key(name, version))
        except OSError as error:
            remedy = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check this disk"
            _log.warning("cache %s: %s was not added: %s; %s", self.folder, digest, error.strerror, remedy)

    def _add_object(self, name: str, source: Path) -> bool:
        """Copy a file into the cache; return whether it is there now."""
        with FileIO(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            size = os.fstat(file.fileno()).st_size
            with self._lock:
                if name in self._objects:
                    self._objects.move_to_end(name)
                    return True
                if size > self.max_size:
                    _log.info("cache: %s has %d bytes, more than cache.max_size", name, size)
                    return False
                self._make_room(size)
                self._total += size  # before it is there, so that others make room for it as well
            is_added = False
            try:
                is_added = self._store(file, name, size)
            finally:
                with self._lock:
                    if not is_added or name in self._objects:
                        self._total -= size
                    if is_added:
                        self._objects[name] = size
                    _SIZE.set(self._total)
        return is_added

    def _store(self, file: FileIO, name: str, size: int) -> bool:
        incoming = self._incoming / secrets.token_hex(8)
        try:
            if not _copy_verified(file, incoming, size, name):
                return False
            incoming.chmod(0o400)
            incoming.replace(self._objects_folder / name)
        finally:
            incoming.unlink(missing_ok=True)
        return True

    def _add_key(self, key: str, value: _Key) -> None:
        if value.object not in self._objects or self._keys.get(key) == value:
            return
        incoming = self._incoming / secrets.token_hex(8)
        incoming.write_text(json.dumps({"object": value.object, "version": value.version}), "utf-8")
        incoming.replace(self._keys_folder / key)
        self._keys[key] = value

    def _make_room(self, size: int) -> None:
        while self._objects and self._total + size > self.max_size:
            self._remove(next(iter(self._objects)))
            _EVICTED.add(1)

    def _remove(self, name: str) -> None:
        self._total -= self._objects.pop(name, 0)
        for key in [key for key, value in self._keys.items() if value.object == name]:
            self._remove_key(key)
        with suppress(OSError):
            (self._objects_folder / name).unlink(missing_ok=True)
        _SIZE.set(self._total)

    def _remove_key(self, key: str) -> None:
        del self._keys[key]
        with suppress(OSError):
            (self._keys_folder / key).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SchedulerCache:
    """The cache as the jobs of one scheduler see it."""

    cache: ContentCache
    scheduler: str

    def key(self, kind: str, source: str) -> str:
        """Return the key of a source.

        Args:
            kind: kind of source; `DIGEST` if its digest is all that is known of it.
            source: what identifies it; may be secret.
        """
        return hashlib.sha256(json.dumps([self.scheduler, kind, source]).encode()).hexdigest()


def _copy_verified(file: FileIO, target: Path, size: int, name: str) -> bool:
    """Copy a file to a new one and return whether the copy is what its name says."""
    with FileIO(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+") as copy:
        if copy_range(file.fileno(), copy.fileno(), size) != size:
            return False
        hasher: Any = hashlib.sha256() if name.startswith("sha256-") else blake3()
        return hash_file(copy, hasher)[1] == name.replace("-", ":", 1)
