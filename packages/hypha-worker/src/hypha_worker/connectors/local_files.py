"""Copies of files and folders of a shared file system, under the roots that the worker's owner allows.

A file that changes while it is read is an error, since what was read may be half of each version.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path, PurePosixPath

import anyio.from_thread

from hypha_net.connectors.content import BLOCK, FetchedContent
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.errors import BridgeError, bad_request, is_disk_fault, not_allowed, not_found, peer_failed
from hypha_worker.file_copy import copy_range
from hypha_worker.task_storage import MAX_ENTRIES, TaskStorage


async def copy_local_files(text: str, target: PurePosixPath, access: AccessPolicy, storage: TaskStorage) -> None:
    """Copy the file or folder at the absolute path `text` to `target` of the job's folder.

    Links below a folder are followed if they lead to files under the roots.

    Raises:
        BridgeError: it is not allowed, not found, no file or folder, changes meanwhile, or holds what is neither.
        StorageExceededError: it would exceed the storage.
        OSError: it cannot be written.
    """
    await storage.run(_copy_and_publish, text, target, access, storage)


def _copy_and_publish(text: str, target: PurePosixPath, access: AccessPolicy, storage: TaskStorage) -> None:
    with storage.files.staged() as staged:
        copy_local_tree(text, staged, access, storage, hashed=False)
        storage.files.publish(staged, target)


def copy_local_tree(
    text: str, target: Path, access: AccessPolicy, storage: TaskStorage, *, hashed: bool = True
) -> dict[str, FetchedContent]:
    """Copy a file or folder in a worker thread; return the files by their path in it, which is empty for a file.

    Raises:
        BridgeError, StorageExceededError, OSError: as `copy_local_files`.
    """
    source = access.resolve_path(text)
    if source.is_file():
        return {"": copy_local_file(source, target, access, storage, hashed=hashed)}
    if not source.is_dir():
        why = "is neither a file nor a folder" if source.exists() else "does not exist"
        raise not_found(f"path {text!r} {why}")
    target.mkdir(mode=0o700)
    found: dict[str, FetchedContent] = {}
    count = 0
    for folder, folders, files in os.walk(source):
        for name in [*folders, *files]:
            path = Path(folder, name)
            count += 1
            if count > MAX_ENTRIES:
                raise bad_request(f"path {text!r} holds more than {MAX_ENTRIES} files: pack them into an archive")
            copied = target / path.relative_to(source)
            if path.is_dir() and not path.is_symlink():
                copied.mkdir(mode=0o700)
                continue
            real = access.resolve_path(str(path))
            if not real.is_file():
                raise bad_request(f"{str(path)!r} is neither a file nor a link to one")
            found[path.relative_to(source).as_posix()] = copy_local_file(real, copied, access, storage, hashed=hashed)
    return found


def copy_local_file(
    source: Path, target: Path, access: AccessPolicy, storage: TaskStorage, *, hashed: bool = True
) -> FetchedContent:
    """Copy a file that `AccessPolicy` has resolved, in a worker thread; stop when the caller is cancelled.

    Without `hashed` the kernel copies it, or the file system shares its blocks, and the digest is empty.

    Raises:
        BridgeError: it cannot be read, or changes meanwhile.
        StorageExceededError: it would exceed the storage.
        OSError: it cannot be written.
    """
    try:
        with _open(source, access) as reader, target.open("xb", buffering=0) as writer:
            before = os.fstat(reader.fileno())
            storage.reserve(target, before.st_size)
            if not hashed:
                with suppress(OSError):  # the copy by blocks of what is left tells whose error it is
                    copy_range(reader.fileno(), writer.fileno(), before.st_size)
            digest = _copy_content(reader, writer, before.st_size, storage, source, target)
            fetched = FetchedContent(writer.tell(), digest if hashed else "")
            after = os.fstat(reader.fileno())
    finally:
        storage.release(target)
    if _version(before) != _version(after) or fetched.size != before.st_size:
        raise peer_failed(
            f"file {str(source)!r} changed while it was read ({before.st_size} bytes before, {after.st_size} "
            "after): write a new file and rename it instead"
        )
    return fetched


def _version(about: os.stat_result) -> tuple[int, int]:
    return about.st_size, about.st_mtime_ns


def _open(source: Path, access: AccessPolicy) -> FileIO:
    try:
        return access.open_file(source)
    except FileNotFoundError:
        raise not_found(f"file {str(source)!r} does not exist") from None
    except PermissionError as error:
        raise not_allowed(f"file {str(source)!r}: {error.strerror}: let the worker's user read it") from None
    except OSError as error:
        raise _read_error(source, error) from error


def _copy_content(reader: FileIO, writer: FileIO, size: int, storage: TaskStorage, source: Path, target: Path) -> str:
    """Copy from the positions of both files on; return the digest of what was copied."""
    sha256 = hashlib.sha256()
    while block := _read(reader, source):
        anyio.from_thread.check_cancelled()
        storage.reserve(target, max(size, writer.tell() + len(block)))
        sha256.update(block)
        rest = memoryview(block)
        while rest:
            rest = rest[writer.write(rest) :]
    return f"sha256:{sha256.hexdigest()}"


def _read(reader: FileIO, source: Path) -> bytes:
    try:
        return reader.read(BLOCK)
    except OSError as error:  # of the shared file system, not of this worker's disk
        raise _read_error(source, error) from error


def _read_error(source: Path, error: OSError) -> BridgeError:
    remedy = "check the shared file system" if is_disk_fault(error) else "check the path"
    return peer_failed(f"file {str(source)!r} cannot be read: {error.strerror}: {remedy}")
