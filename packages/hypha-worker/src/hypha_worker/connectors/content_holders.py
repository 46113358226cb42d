"""Files by their SHA-256: their holders are found in the DHT and tried in turn, and what they send is verified.

A holder that sends other content than it announces is tried last from then on. Large content is pulled from several
holders at once: each gets one part after another, so that the faster one sends more. If that fails they are tried one
by one: only the digest of the whole is known, so that a wrong part cannot be told from the others.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final

import anyio

from hypha_net import content_directory, instrumentation, retries, transfer
from hypha_net.connectors.content import CachedVersion
from hypha_net.content_directory import ContentHolder, is_sha256
from hypha_net.errors import ContentMismatchError, NetError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_proto.transfer import PullRequest
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile
from hypha_worker.content_cache import DIGEST
from hypha_worker.errors import StorageExceededError, bad_request, not_found, peer_failed, to_bridge_error
from hypha_worker.file_copy import hash_file

_log = logging.getLogger(__name__)

MIN_SIZE: Final = 32 << 20
"""Bytes from which on content is pulled from several holders at once."""
PART: Final = 16 << 20
"""Bytes of a part; what was on its way when one has ended is lost, at most a receive window."""
MAX_HOLDERS: Final = 4
_BAD: Final = instrumentation.Counter(
    "hypha.worker.content.bad", "{file}", "Files whose holder sent other content than it had announced."
)


@dataclass(slots=True)
class HolderFaults:
    """How often each peer has sent other content than it had announced."""

    _counts: Counter[PeerId] = field(default_factory=Counter)

    def count(self, peer: PeerId) -> None:
        """Count a fault of a peer."""
        self._counts[peer] += 1
        _BAD.add(1, {"hypha.peer.id": str(peer)})

    def without_faults(self, holders: Sequence[ContentHolder]) -> list[PeerId]:
        """Return the ids of the holders of which no fault was counted."""
        return [holder.peer for holder in holders if not self._counts[holder.peer]]

    def sorted(self, holders: Sequence[ContentHolder]) -> list[PeerId]:
        """Return the holders' ids, those with the fewest faults first."""
        return sorted((holder.peer for holder in holders), key=lambda peer: self._counts[peer])


def check_sha256(text: str) -> str:
    """Return the hex digits of a SHA-256, with or without ``sha256:``.

    Raises:
        BridgeError: it is none.
    """
    digits = text.removeprefix("sha256:")
    if not is_sha256(digits):
        raise bad_request(f"sha256: {text!r} is not a SHA-256: write 64 lower-case hex digits")
    return digits


async def fetch_by_sha256(text: str, target: Path, files: PeerFiles, faults: HolderFaults) -> transfer.PullResult:
    """Pull content to a staged path from any of its holders.

    Raises:
        BridgeError: it is no SHA-256, nobody has it, no holder could provide it, or the job's storage is used up.
        DiskFaultError: this machine cannot store it.
    """
    sha256 = check_sha256(text)
    digest = f"sha256:{sha256}"
    size = await files.storage.take_cached_version(DIGEST, digest, target)
    if size is not None:
        return transfer.PullResult(size, digest)
    wanted = WantedFile(SliceAddress(dataset=digest, index=0), digest, policy=retries.HOLDER)
    failures: dict[PeerId, NetError] = {}
    for attempt in range(1 + retries.NO_HOLDER.times):
        holders = await _find(files, sha256)
        if not attempt and (several := await _pull_from_several(holders, digest, target, files, faults)):
            return several
        for peer in faults.sorted(holders):
            if isinstance(failures.get(peer), ContentMismatchError):
                continue
            found = await files.pull_once([peer], wanted, target)
            if not isinstance(found, dict):
                return found[0]
            failures |= found
            if isinstance(found[peer], ContentMismatchError):
                _log.warning("%s sent other content than it had announced: %s", peer, found[peer])
                faults.count(peer)
        if attempt < retries.NO_HOLDER.times:
            await retries.NO_HOLDER.wait(attempt)
    if not failures:
        raise not_found(f"{digest}: no peer announces it: provide it with hypha-data provide FILE")
    reasons = "; ".join(f"{peer}: {error}" for peer, error in failures.items())
    raise peer_failed(f"{digest}: none of its holders could provide it: {reasons}")


async def _pull_from_several(
    holders: Sequence[ContentHolder], digest: str, target: Path, files: PeerFiles, faults: HolderFaults
) -> transfer.PullResult | None:
    """Pull large content from several holders without faults at once; None if it cannot be had so."""
    size = max((holder.size for holder in holders), default=0)
    peers = faults.without_faults([holder for holder in holders if holder.size == size])
    if size < MIN_SIZE or len(peers) < 2:
        return None
    pulled = await _pull_parts(peers, digest, size, target, files)
    if pulled is not None:
        await files.storage.put_cached_version(DIGEST, digest, target, CachedVersion(digest, ""))
    return pulled


async def _find(files: PeerFiles, sha256: str) -> list[ContentHolder]:
    """Look up the holders but this worker itself; none if no gateway answers."""
    try:
        found = await content_directory.find_holders(files.endpoint, sha256)
    except NetError as error:
        _log.warning("holders of sha256:%s cannot be looked up: %s", sha256, error)
        return []
    return [holder for holder in found if holder.peer != files.endpoint.peer_id]


async def _pull_parts(
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
    with FileIO(path) as file:
        return hash_file(file, hashlib.sha256())[1]
