"""Download of a task's output, which `task_updates` has checked, from the worker that holds it to a file or folder.

The files are pulled beside their destination, which appears when all of them are there.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_net import instrumentation, retries, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import (
    ContentMismatchError,
    NoSpaceError,
    TransferRefusedError,
    first_leaf_error,
)
from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredFile, StoredOutput
from hypha_proto.transfer import PullRequest

_log = logging.getLogger(__name__)

MAX_CONCURRENT: Final = 4
"""Files of one output that are pulled at a time."""
_FALSE: Final = instrumentation.Counter(
    "hypha.scheduler.outputs.refused", "{file}", "Files of outputs with another content than their workers reported."
)
_MIN_TIMEOUT: Final = 600.0
_MIN_RATE: Final = 1 << 18
"""Bytes a second of a large file; what is slower has failed."""


async def download_output(endpoint: Endpoint, output: StoredOutput, holder: PeerId, target: Path) -> int:
    """Pull an output to `target`, which must not exist; return its size in bytes. A failure leaves nothing behind.

    Raises:
        NetError: the holder cannot be reached, no longer has it, or has other content than it has announced; or the
            disk has no room for it.
        OSError: it cannot be stored.
    """
    size = output.size
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        await anyio.to_thread.run_sync(_prepare, part, target, size)
        await _pull_all(endpoint, output, holder, part)
        await anyio.to_thread.run_sync(os.rename, part / "content", target)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, part, ignore_errors=True))
    return size


def _prepare(part: Path, target: Path, size: int) -> None:
    """Create the folder for what is pulled.

    Raises:
        FileExistsError: there is something at `target`.
        NoSpaceError: the disk has no room for `size` bytes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already")
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise NoSpaceError(f"{target}: {size} bytes are to be stored, and {free} are free")
    part.mkdir()


async def _pull_all(endpoint: Endpoint, output: StoredOutput, holder: PeerId, part: Path) -> None:
    """Pull all files to the file or folder ``content``."""
    content = part / "content"
    if not output.is_file:
        await anyio.to_thread.run_sync(_make_folders, content, output)
    limiter = anyio.CapacityLimiter(MAX_CONCURRENT)
    try:
        async with anyio.create_task_group() as tasks:
            for index, file in enumerate(output.files):
                await limiter.acquire_on_behalf_of(index)
                tasks.start_soon(_pull_one, endpoint, output, index, holder, content / file.path, limiter)
    except ExceptionGroup as errors:
        raise first_leaf_error(errors) from None


def _make_folders(content: Path, output: StoredOutput) -> None:
    for folder in sorted({content, *((content / file.path).parent for file in output.files)}):
        folder.mkdir(parents=True, exist_ok=True)


async def _pull_one(
    endpoint: Endpoint, output: StoredOutput, index: int, holder: PeerId, path: Path, limiter: anyio.CapacityLimiter
) -> None:
    file = output.files[index]
    what = f"file {file.path or output.name!r} of output {output.name!r} at {holder}"

    pull = partial(_pull, endpoint, output, index, holder, path)
    try:
        await retries.OUTPUT.retry_unreachable(f"{what} cannot be fetched", pull)
    except ContentMismatchError as error:
        _FALSE.add()
        raise ContentMismatchError(f"{what} is not what its worker reported: {error}") from error
    except TransferRefusedError as error:
        raise TransferRefusedError(f"{what}: {error.reason}") from error
    finally:
        limiter.release_on_behalf_of(index)


async def _pull(endpoint: Endpoint, output: StoredOutput, index: int, holder: PeerId, path: Path) -> None:
    file: StoredFile = output.files[index]
    request = PullRequest(dataset=output.dataset, index=index)
    timeout = max(_MIN_TIMEOUT, file.size / _MIN_RATE)
    pulled = await transfer.pull(
        endpoint, holder, request, path, max_bytes=file.size, digest=file.digest, timeout=timeout
    )
    if pulled.size != file.size:
        raise ContentMismatchError(f"{pulled.size} bytes where {file.size} were announced")
