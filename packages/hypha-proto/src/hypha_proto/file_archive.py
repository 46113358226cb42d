"""Tar archives that carry the files of a model or preprocessor as one file.

An archive holds only regular files and is not compressed, so its content has at most as many bytes as the archive. The
scheduler unpacks what it copies, and an executor what its worker has fetched.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, cast

from hypha_proto.errors import ProtoError
from hypha_proto.ids import is_inside
from hypha_proto.texts import quote

MAX_ARCHIVE_FILES: Final = 1000
_BLOCK: Final = 1 << 20
_MAX_READ: Final = 2 * _BLOCK
"""Maximum number of bytes in one read: a header may state any length of a name."""


class ArchiveError(ProtoError, ValueError):
    """An archive that is damaged, or holds what may not be unpacked."""


class _BoundedReads:
    """A file that refuses reads of more than `_MAX_READ` bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes.

        Raises:
            tarfile.ReadError: `size` is above the bound.
        """
        if not 0 <= size <= _MAX_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive.

    Raises:
        ArchiveError: it is damaged.
    """
    try:
        with path.open("rb") as file, tarfile.open(fileobj=cast("BinaryIO", _BoundedReads(file)), mode="r:") as archive:
            yield archive
    except (tarfile.TarError, ValueError, RecursionError) as error:  # the last: headers that follow each other
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"it is no tar archive, or is damaged: {error}") from None


def is_archive(path: Path) -> bool:
    """Return whether a file is an uncompressed tar archive.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with _opened(path) as archive:
            return archive.next() is not None
    except ArchiveError:
        return False


def unpack_archive(path: Path, folder: Path) -> list[str]:
    """Unpack the files of an archive to a folder that exists; return their names, relative to it.

    If all files are in one folder of the archive, their names begin below it.

    Raises:
        ArchiveError: it is damaged, or holds links, devices, sparse files, names that lead elsewhere, or too many.
        OSError: it cannot be read, or a file cannot be written.
    """
    with _opened(path) as archive:
        members = _files(archive)
        _check_end(path, archive.offset)
        names = _below_common_folder([PurePosixPath(member.name) for member in members])
        for member, name in zip(members, names, strict=True):
            _write(archive, member, folder / name)
    return sorted(map(str, names))


def _files(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    found: dict[PurePosixPath, tarfile.TarInfo] = {}
    count = 0
    while (member := archive.next()) is not None:
        count += 1
        shown = quote(member.name)
        if count > MAX_ARCHIVE_FILES:
            raise ArchiveError(f"it holds more than {MAX_ARCHIVE_FILES} files and folders")
        if member.isdir():
            continue
        if not member.isfile() or member.issparse():
            raise ArchiveError(f"{shown} is no plain file: pack files, without links and sparse files")
        path = PurePosixPath(member.name)
        if not is_inside(member.name) or not member.name.isprintable():
            raise ArchiveError(f"{shown} is no relative path inside the archive")
        if path in found:
            raise ArchiveError(f"it holds {shown} twice")
        found[path] = member
    if not found:
        raise ArchiveError("it holds no files")
    return list(found.values())


def _check_end(path: Path, offset: int) -> None:
    """Refuse an archive that was truncated between two files, which tarfile accepts: it lacks the end mark."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ArchiveError("its end is missing: the archive is cut off")


def _below_common_folder(paths: list[PurePosixPath]) -> list[PurePosixPath]:
    while len({path.parts[0] for path in paths}) == 1 and all(len(path.parts) > 1 for path in paths):
        paths = [PurePosixPath(*path.parts[1:]) for path in paths]
    return paths


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None  # it is a file
    target.parent.mkdir(parents=True, exist_ok=True)
    left = member.size
    with content, target.open("xb") as file:
        while block := content.read(min(_BLOCK, left)):
            file.write(block)
            left -= len(block)
    if left:
        raise ArchiveError(f"{quote(member.name)} ends {left} bytes too early: the archive is cut off")
