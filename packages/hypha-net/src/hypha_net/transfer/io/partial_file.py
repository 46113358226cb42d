"""Incomplete file of a transfer, hashed while it is written and renamed to its target when it is complete.

An incomplete file lies beside its target, preallocated. Its name contains the announced digest, so that only a transfer
of the same content resumes it. Its last eight bytes hold the number of bytes received, which survives the end of the
process; after a crash of the system the digest shows whether the content is right.

There is no fsync before the rename, which would take longer than the transfer: a file is a copy of what a peer still
has, or the update of a round that is void after a system crash. Content that has to survive, such as a trained model,
is synced by the code that keeps it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

from hypha_net.errors import NoSpaceError, TransferError
from hypha_net.transfer.io.integrity import ContentVerifier

MIN_RESUMABLE: Final = 1 << 20
"""Bytes below which an interrupted transfer starts again from the beginning."""
MAX_SUSPENDED: Final = 8
"""Suspended files kept per folder; the oldest are removed first."""
MAX_AGE: Final = 24 * 3600.0
"""Seconds for which a suspended file is kept."""
_LOCK_GRACE: Final = 5.0
"""Seconds for which a new file is not removed as superfluous, because it may not be locked yet."""
_TRAILER: Final = 8
_HASH_BLOCK: Final = 1 << 20
_WRITE_SIZE: Final = 256 << 10
"""Bytes written at a time. Linux puts a write of 2 MiB into one huge page of the page cache; in a virtual machine whose
host takes back free huge pages (free page reporting) such writes took 0.6 to 2.8 s of system time a GiB, not 0.2 s."""
_PREFIX, _SUFFIX = ".hypha-", ".part"


class StorageQuota(Protocol):
    """Bound that a caller sets on the disk space of several files together.

    Asked before anything is allocated or written. Its methods are called in worker threads, from several at once.
    """

    def reserve(self, path: Path, size: int) -> None:
        """Count `size` bytes for the file at `path`, even if it holds fewer; replaces its earlier reservation.

        Raises:
            TransferRefusedError: the files together would exceed the bound; the reservation stays as it was.
        """
        ...

    def release(self, path: Path) -> None:
        """Count the size of the file at `path` instead of its reservation. No error without one."""
        ...


@dataclass(slots=True)
class PartialFile:
    """Open incomplete file. Its methods block; only one may run at a time."""

    path: Path
    target: Path
    file: FileIO
    size: int
    """Total number of bytes."""
    digest: str
    received: int = 0
    """Number of bytes received so far."""
    quota: StorageQuota | None = None
    _verifier: ContentVerifier = field(init=False)
    _hashed: int = 0

    def __post_init__(self) -> None:
        self._verifier = ContentVerifier(self.size, self.digest)

    def rehash_existing(self) -> None:
        """Hash what an earlier transfer left, so that more can be appended."""
        block = memoryview(bytearray(min(_HASH_BLOCK, max(1, self.received))))
        self.file.seek(0)
        while self._hashed < self.received:
            count = self.file.readinto(block[: self.received - self._hashed])
            if not count:
                raise TransferError(f"{self.path} became shorter while it was read")
            self._verifier.update(block[:count])
            self._hashed += count

    def append(self, block: memoryview) -> None:
        """Append a block.

        Raises:
            NoSpaceError: there is no space for it.
        """
        rest = block
        try:
            while rest:
                piece = rest[:_WRITE_SIZE]
                count = self.file.write(piece)
                self._verifier.update(piece[:count])
                rest = rest[count:]
        except OSError as error:
            raise _disk_full_error(self.path, error) from error
        self.received = self._hashed = self._hashed + len(block)
        if self._resumable:
            os.pwrite(self.file.fileno(), self.received.to_bytes(_TRAILER, "little"), self.size)

    def finish(self) -> str:
        """Verify length and digest, rename the file to its target and return its digest.

        Raises:
            TransferError: it is not what was announced; it is removed.
        """
        try:
            found = self._verifier.verify(self.received)
        except TransferError:
            self.discard()
            raise
        os.ftruncate(self.file.fileno(), self.received)
        self._release_quota()
        os.replace(self.path, self.target)
        self.file.close()
        return found

    def suspend(self) -> None:
        """Keep the file for a later transfer if enough was received, else remove it. Does nothing once it is closed."""
        if self.file.closed:
            return
        if self._resumable and self.received >= MIN_RESUMABLE:
            self._release_unused_space()
            self.file.close()
            self._release_quota()
            _remove_stale(self.path.parent)
        else:
            self.discard()

    def _release_unused_space(self) -> None:
        """Give back the disk space preallocated beyond the received bytes."""
        fd, size = self.file.fileno(), self.size
        os.ftruncate(fd, self.received)
        os.ftruncate(fd, size + _TRAILER)
        os.pwrite(fd, self.received.to_bytes(_TRAILER, "little"), size)

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.file.close()
        self._release_quota()

    def _release_quota(self) -> None:
        if self.quota is not None:
            self.quota.release(self.path)

    @property
    def _resumable(self) -> bool:
        return self.path.name == partial_name(self.digest)


def partial_name(digest: str) -> str:
    """Return the name of an incomplete file with this digest."""
    return f"{_PREFIX}{digest.replace(':', '-')}{_SUFFIX}"


def resumable_bytes(target: Path, digest: str | None) -> int:
    """Return how many bytes of content with this digest an earlier transfer left beside `target`."""
    if digest is None:
        return 0
    try:
        with target.with_name(partial_name(digest)).open("rb", buffering=0) as file:
            fd = file.fileno()
            return _stored_bytes(fd, max(0, os.fstat(fd).st_size - _TRAILER))
    except FileNotFoundError:
        return 0


def open_partial_file(target: Path, size: int, digest: str, quota: StorageQuota | None = None) -> PartialFile:
    """Create an incomplete file, or reopen the one that an earlier transfer of the same content left.

    Args:
        target: final path; its folder exists.
        size: total number of bytes, for which space is allocated at once.
        digest: expected digest (``blake3:…`` or ``sha256:…``, as the wire's types check).
        quota: bounds what this and other transfers store.

    Raises:
        TransferRefusedError: the quota does not allow it; nothing was allocated.
        NoSpaceError: there is no space for it.
        OSError: the folder cannot be written.
    """
    _remove_stale(target.parent)
    path = target.with_name(partial_name(digest))
    file = _open_locked(path)
    if file is not None:
        partial = PartialFile(path, target, file, size, digest)
    else:  # another transfer is receiving the same content
        path = target.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        partial = PartialFile(path, target, FileIO(path, "x+"), size, digest)
        fcntl.flock(partial.file, fcntl.LOCK_EX)
    partial.quota = quota
    try:
        partial.received = _reserve_space(partial)
    except BaseException:
        partial.discard()
        raise
    return partial


def _open_locked(path: Path) -> FileIO | None:
    """Open and lock a file; return None if another writer has it."""
    while True:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.close()  # its transfer ended meanwhile and removed or renamed it: try again


def _reserve_space(partial: PartialFile) -> int:
    """Allocate space for the whole file; return how many bytes are there already."""
    if partial.quota is not None:
        partial.quota.reserve(partial.path, partial.size)
    fd, allocated = partial.file.fileno(), partial.size + _TRAILER
    there = _stored_bytes(fd, partial.size)
    if there == 0:
        os.ftruncate(fd, 0)
    try:
        _allocate(fd, there, allocated, partial.path.parent)
    except OverflowError:
        raise TransferError(f"no file system holds a file of {partial.size} bytes") from None
    except OSError as error:
        raise _disk_full_error(partial.path, error) from error
    return there


def _stored_bytes(fd: int, size: int) -> int:
    if os.fstat(fd).st_size != size + _TRAILER:
        return 0
    there = int.from_bytes(os.pread(fd, _TRAILER, size), "little")
    return there if there <= size else 0


def _allocate(fd: int, begin: int, size: int, folder: Path) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, begin, size - begin)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    if shutil.disk_usage(folder).free < size - begin:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size)  # sparse: this file system cannot preallocate


def _disk_full_error(path: Path, error: OSError) -> Exception:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    return NoSpaceError(f"no room for the file in {path.parent}: {error.strerror}; free some space there")


def _remove_stale(folder: Path) -> None:
    """Remove suspended files that are too old or too many; files being written are locked and stay."""
    waiting = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            waiting.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue
    waiting.sort(reverse=True)
    now = time.time()
    for index, (changed, path) in enumerate(waiting):
        age = now - changed
        if age > MAX_AGE or (index >= MAX_SUSPENDED and age > _LOCK_GRACE):
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (FileNotFoundError, BlockingIOError):
        return
