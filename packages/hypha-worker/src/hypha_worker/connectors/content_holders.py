"""Files by their SHA-256: their holders are found in the DHT and tried in turn, and what they send is verified.

Called by `downloads` and `tasks.resource_fetcher`. A holder that sends other content than it announces is tried last
from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from hypha_net import content_directory, transfer
from hypha_net.backoff import jittered
from hypha_net.content_directory import ContentHolder, is_sha256
from hypha_net.errors import ContentMismatchError, NetError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_worker.connectors import parallel_pull
from hypha_worker.connectors.holder_faults import HolderFaults
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import bad_request, not_found, peer_failed

_log = logging.getLogger(__name__)

ROUNDS: Final = 4
"""Times that holders are looked up and tried before a fetch fails."""
LOOKUP_DELAYS: Final = (0.5, 1.0, 2.0)
"""Seconds before each further lookup."""


def check_sha256(text: str) -> str:
    """Return the hex digits of a SHA-256, with or without ``sha256:``.

    Raises:
        BridgeError: it is none.
    """
    digits = text.removeprefix("sha256:")
    if not is_sha256(digits):
        raise bad_request(f"sha256: {text[:80]!r} is not a SHA-256: write 64 lower-case hex digits")
    return digits


async def fetch_by_sha256(text: str, target: Path, files: PeerFiles, faults: HolderFaults) -> transfer.PullResult:
    """Pull content to a staged path from any of its holders.

    Raises:
        BridgeError: it is no SHA-256, nobody has it, no holder could provide it, or the job's storage is used up.
        DiskFaultError: this machine cannot store it.
    """
    sha256 = check_sha256(text)
    digest = f"sha256:{sha256}"
    size = await files.storage.take_cached(digest, target)
    if size is not None:
        return transfer.PullResult(size, digest)
    failures: dict[PeerId, NetError] = {}
    for attempt in range(ROUNDS):
        holders = await _find(files, sha256)
        if not attempt and (several := await _pull_from_several(holders, digest, target, files, faults)):
            return several
        for peer in faults.sorted(holders):
            if isinstance(failures.get(peer), ContentMismatchError):
                continue
            found = await files.pull_once([peer], SliceAddress(dataset=digest, index=0), target, digest)
            if not isinstance(found, dict):
                return found
            failures |= found
            if isinstance(found[peer], ContentMismatchError):
                _log.warning("%s sent other content than it had announced: %s", peer, found[peer])
                faults.count(peer)
        if attempt < ROUNDS - 1:
            await anyio.sleep(jittered(LOOKUP_DELAYS, attempt))
    if not failures:
        raise not_found(f"{digest}: no peer announces it: provide it with hypha-data provide FILE")
    reasons = "; ".join(f"{peer}: {str(error)[:300]}" for peer, error in failures.items())
    raise peer_failed(f"{digest}: none of its holders could provide it: {reasons}"[:4000])


async def _pull_from_several(
    holders: Sequence[ContentHolder], digest: str, target: Path, files: PeerFiles, faults: HolderFaults
) -> transfer.PullResult | None:
    """Pull large content from several holders without faults at once; None if it cannot be had so."""
    size = max((holder.size for holder in holders), default=0)
    peers = faults.without_faults([holder for holder in holders if holder.size == size])
    if size < parallel_pull.MIN_SIZE or len(peers) < 2:
        return None
    pulled = await parallel_pull.pull_from_several(peers, digest, size, target, files)
    if pulled is not None:
        await files.storage.put_cached(target, digest)
    return pulled


async def _find(files: PeerFiles, sha256: str) -> list[ContentHolder]:
    """Look up the holders but this worker itself; none if no gateway answers."""
    try:
        found = await content_directory.find_holders(files.endpoint, sha256)
    except NetError as error:
        _log.warning("holders of sha256:%s cannot be looked up: %s", sha256, error)
        return []
    return [holder for holder in found if holder.peer != files.endpoint.peer_id]
