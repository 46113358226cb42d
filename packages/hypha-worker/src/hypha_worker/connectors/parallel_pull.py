"""Pulls content from several holders at once: each gets one part after another, so that the faster one sends more.

Called by `content_holders`, which tries the holders one by one if this fails: only the digest of the whole is known, so
that a wrong part cannot be told from the others.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.from_thread

from hypha_net import transfer
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import StorageExceededError, to_bridge_error

_log = logging.getLogger(__name__)

MIN_SIZE: Final = 32 << 20
"""Bytes from which on content is pulled from several holders at once."""
PART: Final = 16 << 20
"""Bytes of a part; what was on its way when one has ended is lost, at most a receive window."""
MAX_HOLDERS: Final = 4
_BLOCK: Final = 1 << 20


async def pull_from_several(
    peers: Sequence[PeerId], digest: str, size: int, target: Path, files: PeerFiles
) -> transfer.PullResult | None:
    """Pull content from some of its holders at once; return None, and leave nothing, if that fails.

    Raises:
        BridgeError: the job's storage is used up.
        OSError: the file cannot be written.
    """
    parts = deque((start, min(start + PART, size)) for start in range(0, size, PART))
    pending = len(parts)

    async def pull_some(peer: PeerId, file: FileIO) -> None:
        nonlocal pending
        while parts:
            start, end = parts.popleft()
            request = PullRequest(dataset=digest, index=0, offset=start)
            try:
                await transfer.pull_range(files.endpoint, peer, request, file, end, size=size, digest=digest)
            except NetError as error:
                _log.info("%s from %s: %s; the others send the rest", digest, peer, error)
                parts.append((start, end))
                return
            pending -= 1

    try:
        files.storage.reserve(target, size)
        with FileIO(target, "x") as file:
            async with anyio.create_task_group() as tasks:
                for peer in peers[:MAX_HOLDERS]:
                    tasks.start_soon(pull_some, peer, file)
        if not pending and await files.storage.run(_digest, target) == digest:
            return transfer.PullResult(size, digest)
        _remove(target)
    except StorageExceededError as error:
        raise to_bridge_error(error) from error
    except BaseException:
        _remove(target)
        raise
    finally:
        files.storage.release(target)
    return None


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    sha256, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with FileIO(path) as file:
        while count := file.readinto(block):
            anyio.from_thread.check_cancelled()
            sha256.update(block[:count])
    return f"sha256:{sha256.hexdigest()}"
