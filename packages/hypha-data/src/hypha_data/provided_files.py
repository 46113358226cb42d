"""Single files that this node provides by their SHA-256: reads, announces and serves them.

Workers find the records (`hypha_net.content_directory`) and pull the files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_data.announcer import INTERVAL
from hypha_data.digest_cache import Fingerprint, OnRead, read_digest
from hypha_data.errors import DatasetError
from hypha_net import content_directory, instrumentation, retries
from hypha_net.endpoint import Endpoint
from hypha_net.transfer import PullSource, TransferError
from hypha_proto.ids import PeerId
from hypha_proto.texts import quote
from hypha_proto.transfer import PullRequest, Refusal

_log = logging.getLogger(__name__)

DIGEST_PREFIX: Final = "sha256:"
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
        return self.fingerprint.matches(self.path)


def read_file(path: Path, on_read: OnRead) -> ProvidedFile:
    """Read a file and compute its digest; blocks.

    Raises:
        DatasetError: it cannot be read, or changes meanwhile.
    """
    try:
        found, digest = read_digest(path, on_read, hashlib.sha256())
    except OSError as error:
        raise DatasetError(f"{path} cannot be provided: {error.strerror or error}") from error
    return ProvidedFile(path, digest.removeprefix(DIGEST_PREFIX), found)


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
            return Refusal(reason=f"no content {quote(digest)} here")
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
        await retries.ANNOUNCEMENT.retry_unreachable(
            f"{path} is not announced yet",
            lambda: content_directory.announce_content(endpoint, file.sha256, file.fingerprint.size),
        )
        announced()
        await anyio.sleep(INTERVAL)
    _log.error("%s is not announced any more: it has changed since it was read", path)
