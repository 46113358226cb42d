"""Copies of files and folders of a shared file system, under the roots that the worker's owner allows.

Called by `tasks.resource_fetcher`; asks `access_policy` first.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Final

import anyio.from_thread

from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.errors import bad_request, not_found
from hypha_worker.job_storage import MAX_ENTRIES, JobStorage

_BLOCK: Final = 1 << 20


async def copy_local_files(text: str, target: PurePosixPath, access: AccessPolicy, storage: JobStorage) -> int:
    """Copy the file or folder at the absolute path `text` to `target` of the job's folder; return its bytes.

    Links below a folder are followed if they lead to files under the roots.

    Raises:
        BridgeError: it is not allowed, not found, no file or folder, or holds what is neither.
        StorageExceededError: it would exceed the storage.
        OSError: it cannot be read or written.
    """
    return await storage.run(_copy_and_publish, text, target, access, storage)


def _copy_and_publish(text: str, target: PurePosixPath, access: AccessPolicy, storage: JobStorage) -> int:
    with storage.files.staged() as staged:
        copied = _copy_tree(text, staged, access, storage)
        storage.files.publish(staged, target)
    return copied


def _copy_tree(text: str, target: Path, access: AccessPolicy, storage: JobStorage) -> int:
    source = access.resolve_path(text)
    if source.is_file():
        return _copy(source, target, access, storage)
    if not source.is_dir():
        found = "is neither a file nor a folder" if source.exists() else "does not exist"
        raise not_found(f"path {text[:120]!r} {found}")
    target.mkdir(mode=0o700)
    total = count = 0
    for folder, folders, files in os.walk(source):
        for name in [*folders, *files]:
            path = Path(folder, name)
            count += 1
            if count > MAX_ENTRIES:
                raise bad_request(f"path {text[:120]!r} holds more than {MAX_ENTRIES} files: pack them into an archive")
            copied = target / path.relative_to(source)
            if path.is_dir() and not path.is_symlink():
                copied.mkdir(mode=0o700)
                continue
            real = access.resolve_path(str(path))
            if not real.is_file():
                raise bad_request(f"{str(path)[:200]!r} is neither a file nor a link to one")
            total += _copy(real, copied, access, storage)
    return total


def _copy(source: Path, target: Path, access: AccessPolicy, storage: JobStorage) -> int:
    """Copy a file in a worker thread; stop when the caller is cancelled."""
    with access.open_file(source) as reader, target.open("xb", buffering=0) as writer:
        size = os.fstat(reader.fileno()).st_size
        storage.reserve(target, size)
        try:
            while block := reader.read(_BLOCK):
                anyio.from_thread.check_cancelled()
                storage.reserve(target, max(size, writer.tell() + len(block)))
                rest = memoryview(block)
                while rest:
                    rest = rest[writer.write(rest) :]
            return writer.tell()
        finally:
            storage.release(target)
