"""Single files that this node provides by their SHA-256: reads, announces and serves them.

Called by `service`; workers find the records (`hypha_net.content_directory`) and pull the files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_data.announcer import INTERVAL, RETRY
from hypha_data.digest_cache import Fingerprint, OnRead
from hypha_data.errors import DatasetError
from hypha_net import content_directory, instrumentation
from hypha_net.backoff import jittered
from hypha_net.endpoint import Endpoint
from hypha_net.errors import UnreachableError
from hypha_net.transfer import PullSource, TransferError
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest, Refusal

_log = logging.getLogger(__name__)

DIGEST_PREFIX: Final = "sha256:"
_BLOCK: Final = 4 << 20
_SERVED: Final = instrumentation.Counter("hypha.data.provided", "{file}", "Provided files that were given to peers.")


@dataclass(frozen=True, slots=True)
class ProvidedFile:
    """A file and what it contained when it was read."""

    path: Path
    sha256: str
    fingerprint: Fingerprint

    @property
    def is_unchanged(self) -> bool:
        """Whether it is still what was read."""
        try:
            return Fingerprint.of(self.path.stat()) == self.fingerprint
        except OSError:
            return False


def read_file(path: Path, on_read: OnRead) -> ProvidedFile:
    """Read a file and compute its digest; blocks.

    Raises:
        DatasetError: it cannot be read, or changes meanwhile.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise DatasetError(f"{path} is not a regular file: name a file to provide")
        sha256, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as file:
            before = Fingerprint.of(os.fstat(file.fileno()))
            while count := file.readinto(block):
                sha256.update(block[:count])
                on_read(count)
            after = Fingerprint.of(os.fstat(file.fileno()))
    except OSError as error:
        raise DatasetError(f"{path} cannot be provided: {error.strerror}") from error
    if after != before:
        raise DatasetError(f"{path} changed while it was read: provide it when it is complete")
    return ProvidedFile(path, sha256.hexdigest(), before)


class ProvidedFiles:
    """The files that are provided, by digest."""

    def __init__(self) -> None:
        self._files: dict[str, ProvidedFile] = {}

    def add(self, file: ProvidedFile) -> None:
        """Serve a file from now on; of several with the same content, the last."""
        self._files[file.sha256] = file

    def resolve(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Return the file that a peer asks for by its digest."""
        digest = request.dataset
        file = self._files.get(digest.removeprefix(DIGEST_PREFIX))
        if file is None or request.index or request.name is not None:
            return Refusal(reason=f"no content {digest[:80]!r} here")
        if not file.is_unchanged:
            _log.error("%s is not served any more: it has changed since it was read", file.path)
            return Refusal(reason=f"{digest} has changed here")
        _SERVED.add(1)
        _log.info("%s for %s, %d bytes", file.path, peer, file.fingerprint.size)
        return PullSource(file.path, f"{DIGEST_PREFIX}{file.sha256}", lambda: _check_unchanged(file))


async def _check_unchanged(file: ProvidedFile) -> None:
    if not file.is_unchanged:
        raise TransferError(f"{DIGEST_PREFIX}{file.sha256} changed while it was sent")


async def keep_provided(
    endpoint: Endpoint, path: Path, files: ProvidedFiles, on_read: OnRead, announced: Callable[[], None]
) -> None:
    """Serve and announce a file until cancelled, or until it has changed; call `announced` each time.

    Raises:
        DatasetError: it cannot be read.
    """
    file = await anyio.to_thread.run_sync(read_file, path, on_read)
    files.add(file)
    _log.info("%s is %s%s, %d bytes", path, DIGEST_PREFIX, file.sha256, file.fingerprint.size)
    while file.is_unchanged:
        await _announce(endpoint, file)
        announced()
        await anyio.sleep(INTERVAL)
    _log.error("%s is not announced any more: it has changed since it was read", path)


async def _announce(endpoint: Endpoint, file: ProvidedFile) -> None:
    attempt = 0
    while True:
        try:
            await content_directory.announce_content(endpoint, file.sha256, file.fingerprint.size)
        except UnreachableError as error:
            delay = jittered(RETRY, attempt)
            _log.warning("%s is not announced yet, trying again in %.1f s: %s", file.path, delay, error)
            await anyio.sleep(delay)
            attempt += 1
        else:
            return
