"""What is on its way in, hashed as it comes, handed over when it is whole: into memory (`gathering`), or into a file.

A file waits beside its landing place, preallocated, and is renamed when it is whole. If its digest was announced it
waits under a name made of that digest, so that only the same content goes on where a broken transfer left off. While it
is incomplete, its last eight bytes say how much of it is there; that survives the end of the process, and after the end
of the system the digest decides.

Nothing is synchronised to the disk (fsync) before the rename: what moves between nodes is a copy of what a peer still
has, or a round's update, which is void after a crash of the system anyway. Waiting for the disk would cost more than
the transfer. What has to survive (a trained model) is synchronised by whoever keeps it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

from blake3 import blake3

from hypha_net.errors import TransferError

KEEP_FROM: Final = 1 << 20
"""Bytes below which a broken transfer begins anew."""
MAX_KEPT: Final = 8
"""Incomplete files that wait in one folder; the oldest goes first."""
MAX_AGE: Final = 24 * 3600.0
"""Seconds that an incomplete file waits."""
_JUST_MADE: Final = 5.0
"""Seconds within which a new file may not be locked yet."""
_TRAILER: Final = 8
_HASHED_AT_ONCE: Final = 1 << 20
_PREFIX, _SUFFIX = ".hypha-", ".part"


class IncomingContent(Protocol):
    """Content that is coming, into a file or into memory. Its methods block; only one may run at a time."""

    @property
    def size(self) -> int | None:
        """Bytes in all, if they were announced."""
        ...

    @property
    def received(self) -> int:
        """Bytes that are there."""
        ...

    def catch_up(self) -> None:
        """Make ready to go on after what an earlier transfer left."""
        ...

    def store(self, block: memoryview) -> None:
        """Append a block; `TransferError` if there is no room for it."""
        ...

    def finish(self) -> str:
        """Check length and digest and hand it over; its digest. `TransferError` if it is not what was announced."""
        ...


class Verification:
    """Whether what comes has the length and the digest that were announced, if they were."""

    def __init__(self, size: int | None, digest: str | None) -> None:
        self._size, self._digest = size, digest
        self._hasher = hashlib.sha256() if digest is not None and digest.startswith("sha256:") else blake3()

    def add(self, block: memoryview) -> None:
        """Hash a block; they come in order."""
        self._hasher.update(block)

    def verdict(self, received: int) -> str:
        """The digest of all the blocks, which were `received` bytes.

        Raises:
            TransferError: they are not what was announced.
        """
        found = f"{self._hasher.name}:{self._hasher.hexdigest()}"
        if self._size is not None and received != self._size:
            raise TransferError(f"{received} bytes came of {self._size}")
        if self._digest is not None and found != self._digest:
            raise TransferError(f"the digest is {found} where {self._digest} was announced")
        return found


@dataclass(slots=True)
class PartialFile:
    """An open incomplete file; see `Arriving`."""

    path: Path
    target: Path
    file: FileIO
    size: int | None
    """Bytes in all, if they were announced."""
    digest: str | None
    received: int = 0
    """Bytes that are there."""
    _verification: Verification = field(init=False)
    _hashed: int = 0

    def __post_init__(self) -> None:
        self._verification = Verification(self.size, self.digest)

    def catch_up(self) -> None:
        """Hash what an earlier transfer left."""
        block = memoryview(bytearray(min(_HASHED_AT_ONCE, max(1, self.received))))
        self.file.seek(0)
        while self._hashed < self.received:
            count = self.file.readinto(block[: self.received - self._hashed])
            if not count:
                raise TransferError(f"{self.path} became shorter while it was read")
            self._verification.add(block[:count])
            self._hashed += count

    def store(self, block: memoryview) -> None:
        """Append a block.

        Raises:
            TransferError: there is no room for it.
        """
        self._verification.add(block)
        rest = block
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            raise _no_room(self.path, error) from error
        self.received = self._hashed = self._hashed + len(block)
        if self._resumable:
            os.pwrite(self.file.fileno(), self.received.to_bytes(_TRAILER, "little"), self.size or 0)

    def finish(self) -> str:
        """Check length and digest and let the file appear at its landing place; its digest.

        Raises:
            TransferError: it is not what was announced; it is removed.
        """
        try:
            found = self._verification.verdict(self.received)
        except TransferError:
            self.drop()
            raise
        os.ftruncate(self.file.fileno(), self.received)
        os.replace(self.path, self.target)
        self.file.close()
        return found

    def leave(self) -> None:
        """Keep it for a later transfer if it is worth it, else remove it. Idempotent, and nothing after `finish`."""
        if self.file.closed:
            return
        if self._resumable and self.received >= KEEP_FROM:
            self._free_the_rest()
            self.file.close()
            _sweep(self.path.parent)
        else:
            self.drop()

    def _free_the_rest(self) -> None:
        """While it waits it takes no more room than what is there."""
        fd, size = self.file.fileno(), self.size or 0
        os.ftruncate(fd, self.received)
        os.ftruncate(fd, size + _TRAILER)
        os.pwrite(fd, self.received.to_bytes(_TRAILER, "little"), size)

    def drop(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        self.file.close()

    @property
    def _resumable(self) -> bool:
        return self.size is not None and self.path.name == waiting_name(self.digest)


def waiting_name(digest: str | None) -> str | None:
    """The name under which content of this digest waits; none if there is no digest."""
    return None if digest is None else f"{_PREFIX}{digest.replace(':', '-')}{_SUFFIX}"


def left_behind(target: Path, digest: str | None) -> int:
    """How many bytes of content with this digest an earlier transfer left beside `target`."""
    name = waiting_name(digest)
    if name is None:
        return 0
    try:
        with target.with_name(name).open("rb", buffering=0) as file:
            fd = file.fileno()
            return _left_there(fd, max(0, os.fstat(fd).st_size - _TRAILER))
    except FileNotFoundError:
        return 0


def open_arriving(target: Path, size: int | None, digest: str | None) -> PartialFile:
    """Begin a file, or take up what is there of it.

    Args:
        target: where it lands; its folder exists.
        size: bytes in all, for which room is made at once.
        digest: what it must hash to (``blake3:…`` or ``sha256:…``, as the wire's types check).

    Raises:
        TransferError: there is no room for it.
        OSError: the folder cannot be written.
    """
    _sweep(target.parent)
    name = waiting_name(digest)
    file = _open_locked(target.with_name(name)) if name is not None and size is not None else None
    if name is not None and file is not None:
        arriving = PartialFile(target.with_name(name), target, file, size, digest)
    else:  # nothing to go by, or another transfer is bringing the same content
        path = target.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        arriving = PartialFile(path, target, FileIO(path, "x+"), size, digest)
        fcntl.flock(arriving.file, fcntl.LOCK_EX)
    try:
        arriving.received = _make_room(arriving)
    except BaseException:
        arriving.drop()
        raise
    return arriving


def _open_locked(path: Path) -> FileIO | None:
    """Open for one writer; none if there is one already."""
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
        file.close()  # its transfer ended meanwhile, and the name is free again


def _make_room(arriving: PartialFile) -> int:
    """Take room for what is to come; how many of its bytes an earlier transfer left, the file at that position."""
    if arriving.size is None:
        return 0
    fd, whole = arriving.file.fileno(), arriving.size + _TRAILER
    there = _left_there(fd, arriving.size)
    if there == 0:
        os.ftruncate(fd, 0)
    try:
        _allocate(fd, there, whole, arriving.path.parent)
    except OverflowError:
        raise TransferError(f"no file system holds a file of {arriving.size} bytes") from None
    except OSError as error:
        raise _no_room(arriving.path, error) from error
    return there


def _left_there(fd: int, size: int) -> int:
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
    os.ftruncate(fd, size)  # sparse: the best this file system can do


def _no_room(path: Path, error: OSError) -> Exception:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    return TransferError(f"no room for the file in {path.parent}: {error.strerror}; free some space there")


def _sweep(folder: Path) -> None:
    """Remove incomplete files that are too old or too many; those that are being written are locked, and stay."""
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
        if age > MAX_AGE or (index >= MAX_KEPT and age > _JUST_MADE):
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except (FileNotFoundError, BlockingIOError):
        return
