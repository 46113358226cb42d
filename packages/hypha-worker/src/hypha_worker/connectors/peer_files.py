"""Files from peers and to peers: slices that the scheduler hands out, models it serves, pseudo-gradients.

Before this room: an executor's request at the bridge. After it: `hypha_net.transfer`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import anyio

from hypha_net import rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, RequestTimeoutError, TransferRefusedError, UnsupportedProtocolError
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.dispatch import NotFound, WireError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import All, PeersReference, Random, SliceAddress
from hypha_proto.protocols import RpcMethod
from hypha_proto.transfer import PullRequest, PushHeader
from hypha_worker.errors import BridgeError, bad_request, no_more_data, peer_failed, timed_out

_log = logging.getLogger(__name__)

T = TypeVar("T")
Req = TypeVar("Req")
Resp = TypeVar("Resp")

RETRY_DELAYS: Final = (0.0, 0.25, 1.0, 3.0)
"""Seconds before each attempt at something that may fail for a moment."""
UNAVAILABLE_DELAYS: Final = (2.0, 5.0, 10.0, 20.0, 30.0, 30.0)
"""Seconds before a file is looked for again where every peer that has it was away: a data node that restarts."""


async def retry(what: str, attempt: Callable[[], Awaitable[T]], delays: Sequence[float] = RETRY_DELAYS) -> T:
    """Try until it works, as often as there are `delays`. A refusal is final.

    Raises:
        NetError: of the last attempt.
    """
    for number, pause in enumerate(delays, 1):
        await anyio.sleep(pause)
        try:
            return await attempt()
        except (TransferRefusedError, UnsupportedProtocolError):
            raise
        except NetError as error:
            if number == len(delays):
                raise
            _log.info("%s failed (%s), attempt %d of %d", what, error, number, len(delays))
    raise ValueError("no attempts were allowed")


async def call_with_retries(
    endpoint: Endpoint,
    peer: PeerId,
    conversation: RpcMethod[Req, Resp],
    message: Req,
    *,
    timeout: float = 10.0,
    delays: Sequence[float] = RETRY_DELAYS,
) -> Resp:
    """`requests.call` with bounded retries. Raises `NetError`."""
    what = f"{conversation.variant or conversation.protocol} to {peer}"
    return await retry(what, lambda: rpc.call(endpoint, peer, conversation, message, timeout=timeout), delays)


def to_bridge_error(error: NetError) -> BridgeError:
    """What an executor is told about a peer that failed."""
    return timed_out(str(error)) if isinstance(error, RequestTimeoutError) else peer_failed(str(error))


async def request_slice(endpoint: Endpoint, scheduler: PeerId, request: DataRequest) -> SliceAssigned:
    """Ask the scheduler for one further slice.

    Raises:
        BridgeError: there is none (410), the scheduler says why not (502), or it does not answer.
    """
    try:
        answer = await call_with_retries(endpoint, scheduler, DATA, request)
    except NetError as error:
        raise to_bridge_error(error) from error
    if isinstance(answer, NotFound):
        raise no_more_data(f"the scheduler has no further slice of {request.dataset[:80]!r}")
    if isinstance(answer, WireError):
        raise peer_failed(f"the scheduler gives no slice of {request.dataset[:80]!r}: {answer.message[:400]}")
    return answer


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Moves files between this worker and peers."""

    endpoint: Endpoint
    max_bytes: int
    """Largest file that is taken."""

    async def pull(
        self, peers: Sequence[PeerId], address: SliceAddress, target: Path, digest: str | None = None
    ) -> tuple[transfer.PullResult, PeerId]:
        """Pull one file from the first of `peers` that gives it; each is tried as often as `RETRY_DELAYS` says.

        Where one of them cannot be asked, or does not serve files yet, all are tried again
        as often as `UNAVAILABLE_DELAYS` says.

        Raises:
            BridgeError: none of them gives it.
        """
        for pause in UNAVAILABLE_DELAYS:
            found = await self._pull_once(peers, address, target, digest)
            if not isinstance(found, list):
                return found
            if all(isinstance(failure, TransferRefusedError) for failure in found):
                raise _all_failed(f"{address.dataset[:80]}/{address.index}", found)
            _log.warning("nobody gives %s/%d, again in %g s: %s", address.dataset, address.index, pause, found[0])
            await anyio.sleep(pause)
        found = await self._pull_once(peers, address, target, digest)
        if isinstance(found, list):
            raise _all_failed(f"{address.dataset[:80]}/{address.index}", found)
        return found

    async def _pull_once(
        self, peers: Sequence[PeerId], address: SliceAddress, target: Path, digest: str | None
    ) -> tuple[transfer.PullResult, PeerId] | list[NetError]:
        """What was pulled and from whom, or why from nobody."""
        request = PullRequest(dataset=address.dataset, index=address.index)
        failures: list[NetError] = []
        for peer in peers:
            try:
                pulled = await retry(
                    f"pull of {address.dataset}/{address.index} from {peer}",
                    lambda peer=peer: transfer.pull(  # type: ignore[misc]
                        self.endpoint, peer, request, target, max_bytes=self.max_bytes, digest=digest
                    ),
                )
                return pulled, peer
            except NetError as error:
                failures.append(error)
        return failures

    async def push(self, reference: PeersReference, path: Path, header: PushHeader) -> dict[PeerId, int]:
        """Push a file to all peers of a reference, or to one of them; gives the bytes sent to each.

        Raises:
            BridgeError: a peer of `All` did not take it, or none of the others did.
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
        raise _all_failed(header.name, failures)

    async def push_to(self, peer: PeerId, path: Path, header: PushHeader) -> int:
        """Push to one peer, with retries; gives the bytes sent. Raises `NetError`."""
        return await retry(f"push of {header.name} to {peer}", lambda: transfer.push(self.endpoint, peer, path, header))

    async def push_each(
        self, peers: Sequence[PeerId], path: Path, header: PushHeader
    ) -> tuple[dict[PeerId, int], dict[PeerId, NetError]]:
        """Push to all of `peers` at once: bytes sent to each, and what went wrong with the others."""
        sent: dict[PeerId, int] = {}
        failed: dict[PeerId, NetError] = {}

        async def one(peer: PeerId) -> None:
            try:
                sent[peer] = await self.push_to(peer, path, header)
            except NetError as error:
                failed[peer] = error

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(one, peer)
        return sent, failed

    async def _push_to_all(self, peers: Sequence[PeerId], path: Path, header: PushHeader) -> dict[PeerId, int]:
        sent, failed = await self.push_each(peers, path, header)
        if failed:
            raise _all_failed(header.name, list(failed.values()))
        return sent


def _all_failed(what: str, failures: Sequence[NetError]) -> BridgeError:
    if not failures:
        return bad_request(f"{what}: the reference names no peer")
    if len(failures) == 1:
        return to_bridge_error(failures[0])
    return peer_failed(f"{what}: " + "; ".join(str(failure) for failure in failures)[:2000])
