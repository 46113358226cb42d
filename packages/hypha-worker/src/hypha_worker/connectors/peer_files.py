"""Transferring files from and to peers: slices that the scheduler assigns, models it serves, pseudo-gradients.

Called by `bridge.backend` for an executor's requests, and by the parameter server. Calls `hypha_net.transfer`, with
the retries of `rpc_retry`.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, TransferRefusedError
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.dispatch import NotFound, WireError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import All, PeersReference, Random, SliceAddress
from hypha_proto.transfer import PullRequest, PushHeader
from hypha_worker.connectors.rpc_retry import call_with_retries, retry
from hypha_worker.errors import (
    BridgeError,
    StorageExceededError,
    bad_request,
    no_more_data,
    peer_failed,
    to_bridge_error,
)
from hypha_worker.job_storage import JobStorage
from hypha_worker.job_traffic import JobTraffic

_log = logging.getLogger(__name__)

UNAVAILABLE_DELAYS: Final = (2.0, 5.0, 10.0, 20.0, 30.0, 30.0)
"""Seconds before each further round over all providers of a file, when none of them is reachable: a data node may be
restarting."""


async def request_slice(endpoint: Endpoint, scheduler: PeerId, request: DataRequest) -> SliceAssigned:
    """Ask the scheduler for one further slice.

    Raises:
        BridgeError: there is none (410), the scheduler refuses with a reason (502), or it does not answer.
    """
    try:
        answer = await call_with_retries(endpoint, scheduler, DATA, request)
    except NetError as error:
        raise to_bridge_error(error) from error
    if isinstance(answer, NotFound):
        raise no_more_data(f"the scheduler has no further slice of {request.dataset[:80]!r}")
    if isinstance(answer, WireError):
        raise peer_failed(f"the scheduler assigned no slice of {request.dataset[:80]!r}: {answer.message[:400]}")
    return answer


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Transfers files between this worker and peers."""

    endpoint: Endpoint
    storage: JobStorage
    """Bounds what is stored."""
    traffic: JobTraffic = field(default_factory=JobTraffic)
    """Counts what is sent."""

    async def pull(
        self, peers: Sequence[PeerId], address: SliceAddress, target: Path, digest: str | None = None
    ) -> tuple[transfer.PullResult, PeerId]:
        """Pull one file from the first of `peers` that has it; each is tried `RETRY_DELAYS` times.

        Where a peer is unreachable, or does not serve files yet, the list is tried again after `UNAVAILABLE_DELAYS`.

        Raises:
            BridgeError: no peer could provide it, or the job's storage is used up.
        """
        for delay in UNAVAILABLE_DELAYS:
            found = await self._pull_from_any(peers, address, target, digest)
            if not isinstance(found, list):
                return found
            if all(isinstance(failure, TransferRefusedError) for failure in found):
                raise _combined_error(f"{address.dataset[:80]}/{address.index}", found)
            name = f"{address.dataset}/{address.index}"
            _log.warning("no peer could provide %s, retrying in %g s: %s", name, delay, found[0])
            await anyio.sleep(delay)
        found = await self._pull_from_any(peers, address, target, digest)
        if isinstance(found, list):
            raise _combined_error(f"{address.dataset[:80]}/{address.index}", found)
        return found

    async def _pull_from_any(
        self, peers: Sequence[PeerId], address: SliceAddress, target: Path, digest: str | None
    ) -> tuple[transfer.PullResult, PeerId] | list[NetError]:
        """Try each peer in turn; return the file and its peer, or the error of each."""
        request = PullRequest(dataset=address.dataset, index=address.index)
        failures: list[NetError] = []
        for peer in peers:
            try:
                pulled = await retry(
                    f"pull of {address.dataset}/{address.index} from {peer}",
                    lambda peer=peer: transfer.pull(  # type: ignore[misc]
                        self.endpoint,
                        peer,
                        request,
                        target,
                        max_bytes=sys.maxsize,
                        digest=digest,
                        quota=self.storage,
                    ),
                )
                return pulled, peer
            except StorageExceededError as error:
                raise to_bridge_error(error) from error
            except NetError as error:
                failures.append(error)
        return failures

    async def push(self, reference: PeersReference, path: Path, header: PushHeader) -> dict[PeerId, int]:
        """Push a file to all peers of a reference, or to one of them; return the bytes sent to each.

        Raises:
            BridgeError: with the strategy `All`, one peer did not accept it; with the others, none did.
        """
        if not reference.peers:
            raise bad_request("the reference names no peer")
        peers = list(reference.peers)
        if isinstance(reference.strategy, All):
            return await self._push_to_all(peers, path, header)
        if isinstance(reference.strategy, Random):
            random.shuffle(peers)
        failures: list[NetError] = []
        for peer in peers:
            try:
                return {peer: await self.push_to(peer, path, header)}
            except NetError as error:
                failures.append(error)
        raise _combined_error(header.name, failures)

    async def push_to(self, peer: PeerId, path: Path, header: PushHeader) -> int:
        """Push to one peer, with retries; return the bytes sent. Raises `NetError`."""
        name = f"push of {header.name} to {peer}"
        sent = await retry(name, lambda: transfer.push(self.endpoint, peer, path, header))
        self.traffic.sent += sent
        return sent

    async def push_each(
        self, peers: Sequence[PeerId], path: Path, header: PushHeader
    ) -> tuple[dict[PeerId, int], dict[PeerId, NetError]]:
        """Push to all of `peers` concurrently; return the bytes sent to each, and the errors of the others."""
        sent: dict[PeerId, int] = {}
        failed: dict[PeerId, NetError] = {}

        async def push_one(peer: PeerId) -> None:
            try:
                sent[peer] = await self.push_to(peer, path, header)
            except NetError as error:
                failed[peer] = error

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(push_one, peer)
        return sent, failed

    async def _push_to_all(self, peers: Sequence[PeerId], path: Path, header: PushHeader) -> dict[PeerId, int]:
        sent, failed = await self.push_each(peers, path, header)
        if failed:
            raise _combined_error(header.name, list(failed.values()))
        return sent


def _combined_error(what: str, failures: Sequence[NetError]) -> BridgeError:
    if not failures:
        return bad_request(f"{what}: the reference names no peer")
    if len(failures) == 1:
        return to_bridge_error(failures[0])
    return peer_failed(f"{what}: " + "; ".join(str(failure) for failure in failures)[:2000])
