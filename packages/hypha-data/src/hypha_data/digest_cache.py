"""Digests of files as they were last read, remembered across restarts so that only changed files are read again.

A digest holds as long as the file's size, inode, time of modification and time of status change stay the same. The last
of these changes with every write and cannot be set by a program, so a rewrite that restores the time of modification is
noticed.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from blake3 import blake3

from hypha_proto.codec import from_json, to_json
from hypha_proto.errors import DecodeError
from hypha_proto.wire_schema import I64, U64, Digest, Message

_log = logging.getLogger(__name__)

CACHE: Final = ".hypha-digests.json"
"""Name of the file, in the dataset's folder."""
SETTLED_NS: Final = 2_000_000_000
"""Nanoseconds after a change from which on another change gets another time; no file system has coarser times."""
_BLOCK: Final = 4 << 20


OnRead = Callable[[int], None]
"""Called with the number of bytes of each block that is read; an error that it raises ends the reading."""


class Fingerprint(NamedTuple):
    """State of a file that differs whenever the file was rewritten or replaced."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        """Return the fingerprint of a file with this status."""
        return cls(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)

    def matches(self, path: Path) -> bool:
        """Return whether a file is in this state."""
        try:
            return Fingerprint.of(path.stat()) == self
        except OSError:
            return False


class RememberedDigest(Message, frozen=True):
    """One file in the cache."""

    file: str
    digest: Digest
    size: U64
    inode: U64
    modified_ns: I64
    changed_ns: I64

    @property
    def fingerprint(self) -> Fingerprint:
        """State of the file when it was read."""
        return Fingerprint(self.size, self.inode, self.modified_ns, self.changed_ns)


class RememberedDigests(Message, frozen=True):
    """Contents of the cache file (JSON)."""

    files: tuple[RememberedDigest, ...]


def ignore_progress(_count: int) -> None:
    """Do nothing; an `OnRead`."""


def read_digest(path: Path, on_read: OnRead, hasher: Any) -> tuple[Fingerprint, str]:
    """Read a file; return its fingerprint, and its digest by `hasher`, which has the interface of `hashlib`.

    Raises:
        OSError: it cannot be read, is no regular file, or changed while it was read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
        raise OSError("not a regular file")
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:  # not memory-mapped: a file cut short meanwhile would end the process
        before = Fingerprint.of(os.fstat(file.fileno()))
        while count := file.readinto(block):
            hasher.update(block[:count])
            on_read(count)
        if Fingerprint.of(os.fstat(file.fileno())) != before:
            raise OSError("it changed while it was read")
    return before, f"{hasher.name}:{hasher.hexdigest()}"


class DigestCache:
    """Digests of the files of one folder."""

    def __init__(self, folder: Path, entries: Iterable[RememberedDigest] = ()) -> None:
        """Start with `entries`; the file on disk is written by `save` only."""
        self._path = folder / CACHE
        self._entries = {entry.file: entry for entry in entries}
        self._unsaved = False
        self._writable = True
        self._saving = threading.Lock()

    @classmethod
    def load(cls, folder: Path) -> DigestCache:
        """Load the cache of a folder; an absent or unusable one counts as empty."""
        path = folder / CACHE
        try:
            remembered: RememberedDigests = from_json(RememberedDigests, path.read_bytes())
        except FileNotFoundError:
            return cls(folder)
        except (OSError, DecodeError) as error:
            _log.warning("%s cannot be used, all slices are read again: %s", path, error)
            return cls(folder)
        return cls(folder, remembered.files)

    def find(self, path: Path) -> tuple[Fingerprint, str] | None:
        """Return fingerprint and digest of a file of the folder, or None if it has changed since it was read.

        Raises:
            OSError: the file's status cannot be read.
        """
        entry = self._entries.get(path.name)
        current = Fingerprint.of(path.stat())
        return None if entry is None or entry.fingerprint != current else (current, entry.digest)

    def read(self, path: Path, on_read: OnRead) -> tuple[Fingerprint, str]:
        """Read a file of the folder; remember and return its fingerprint and digest.

        The digest of a file that was written a moment ago is not remembered: another write may get the same times.

        Raises:
            OSError: the file cannot be read, or changed while it was read.
        """
        found, digest = read_digest(path, on_read, blake3())
        if abs(time.time_ns() - found.changed_ns) >= SETTLED_NS:
            self._entries[path.name] = RememberedDigest(file=path.name, digest=digest, **found._asdict())
            self._unsaved = True
        return found, digest

    def save(self) -> None:
        """Write the cache to its folder if it has changed; a folder that cannot be written to is logged once."""
        with self._saving:  # two manifests of the folder may be checked at a time
            self._save()

    def _save(self) -> None:
        if not self._unsaved:
            return
        self._unsaved = False
        entries = tuple(self._entries.copy().values())
        temporary = self._path.with_name(f"{CACHE}.{os.getpid()}")
        try:
            temporary.write_bytes(to_json(RememberedDigests, RememberedDigests(files=entries)))
            temporary.replace(self._path)
        except OSError as error:
            if self._writable:
                _log.warning("%s cannot be written, so every start reads all slices again: %s", self._path, error)
            self._writable = False
