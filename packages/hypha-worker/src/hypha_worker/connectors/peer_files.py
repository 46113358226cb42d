"""Transferring files from and to peers: slices that the scheduler assigns, models it serves, pseudo-gradients.

Transfers are those of `hypha_net.transfer`, with the retries of `hypha_net.retries`.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

from hypha_net import retries, transfer
from hypha_net.connectors.content import CachedVersion
from hypha_net.endpoint import Endpoint
from hypha_net.errors import ContentMismatchError, NetError, NoSpaceError, TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_proto.bridge_api import FetchedFile
from hypha_proto.datasets import (
    DATA,
    NO_FREE_SLICE,
    SAFETENSORS,
    SLICE_SUFFIXES,
    AssignedSlice,
    DataRequest,
    NotFound,
    SlicesAnswer,
    SlicesAssigned,
    WireError,
)
from hypha_proto.errors import TensorFileError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import All, PeersReference, Random, SliceAddress
from hypha_proto.transfer import PullRequest, PushHeader
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.content_cache import DIGEST
from hypha_worker.errors import (
    BridgeError,
    DiskFaultError,
    PushRefusedError,
    StorageExceededError,
    UnusableFileError,
    bad_request,
    disk_fault_of,
    no_free_slice,
    no_more_data,
    peer_failed,
    to_bridge_error,
)
from hypha_worker.task_storage import TaskStorage

_log = logging.getLogger(__name__)

_PERMANENT: Final = (TransferRefusedError, ContentMismatchError)


async def request_slices(
    contact: SchedulerContact, request: DataRequest, timeout: float = 10.0
) -> tuple[AssignedSlice, ...]:
    """Ask the scheduler for further slices; return at least one, and no more than were asked for.

    Args:
        contact: reaches the scheduler.
        timeout: seconds that one attempt may take.

    Raises:
        BridgeError: there is none (410) or none is free yet (503), the scheduler refuses with a reason or answers with
            slices that cannot be used here (502), or it does not answer.
    """
    try:
        answer = await contact.call(DATA, request, is_refusal=_is_refusal, timeout=timeout, policy=retries.REQUEST)
    except NetError as error:
        raise to_bridge_error(error) from error
    if isinstance(answer, NotFound):
        raise no_more_data(f"the scheduler has no further slice of {request.dataset!r}")
    if isinstance(answer, WireError) and answer.message == NO_FREE_SLICE:
        raise no_free_slice(f"every slice of {request.dataset!r} is assigned to others; ask again")
    if isinstance(answer, WireError):
        raise peer_failed(f"the scheduler assigned no slice of {request.dataset!r}: {answer.message}")
    assigned = answer.slices if isinstance(answer, SlicesAssigned) else (answer,)
    if not 1 <= len(assigned) <= (request.most or 1):
        raise peer_failed(f"the scheduler assigned {len(assigned)} slices and was asked for 1 to {request.most or 1}")
    for each in assigned:
        _check_assigned(each, request.dataset)
    return assigned


def _check_assigned(assigned: AssignedSlice, dataset: str) -> None:
    if assigned.format is not None and assigned.format not in SLICE_SUFFIXES:
        raise peer_failed(
            f"the scheduler assigned a slice of the format {assigned.format!r}, and this worker knows "
            f"{', '.join(SLICE_SUFFIXES)}: update hypha-worker"
        )
    if assigned.end is not None and (assigned.first or 0) >= assigned.end:
        raise peer_failed(
            f"the scheduler assigned no sample of slice {assigned.index} of {dataset!r}: first "
            f"{assigned.first or 0} is not before end {assigned.end}"
        )


def _is_refusal(answer: SlicesAnswer) -> bool:
    """Return whether a scheduler that has not taken up the job yet may have refused a slice for this reason."""
    return isinstance(answer, NotFound) or (isinstance(answer, WireError) and answer.message != NO_FREE_SLICE)


def slice_suffix(assigned: AssignedSlice) -> str:
    """Return the suffix of the file of a slice that `request_slices` returned; it tells executors the format."""
    return SLICE_SUFFIXES[assigned.format or SAFETENSORS]


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file of peers, and what verifies it."""

    address: SliceAddress
    digest: str | None = None
    check: Callable[[Path], None] | None = None
    """Called with the pulled file; raises `ContentMismatchError` if it cannot be used."""
    is_slice: bool = False
    """Whether to ask a peer that refuses the file for the dataset's manifest: one that refuses this, too, does not
    serve the dataset yet, for example after a restart."""
    is_cached: bool = True
    """Whether the worker's cache may have it, and keeps it."""
    policy: RetryPolicy = retries.REQUEST
    """How often each peer is asked again for it."""


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Transfers files between this worker and peers."""

    endpoint: Endpoint
    storage: TaskStorage
    """Bounds what is stored, and counts what is sent."""

    async def pull(
        self, peers: Sequence[PeerId], wanted: WantedFile, target: Path
    ) -> tuple[transfer.PullResult, PeerId]:
        """Pull one file from the first of `peers` that has it; each is tried as `WantedFile.policy` says.

        Peers that are unreachable, or do not serve files yet, are tried again as `NO_PROVIDER` says. A peer that
        refuses the file, or has other content than announced, is not asked again.

        Raises:
            UnusableFileError: no peer could provide it, and at least one of them is not worth asking again.
            DiskFaultError: this machine cannot store it.
            BridgeError: no peer was reachable, or the job's storage is used up.
        """
        name = f"{wanted.address.dataset}/{wanted.address.index}"
        wrong: dict[PeerId, NetError] = {}
        for attempt in itertools.count():
            found = await self.pull_once([peer for peer in peers if peer not in wrong], wanted, target)
            if not isinstance(found, dict):
                return found
            wrong |= {
                peer: error
                for peer, error in found.items()
                if isinstance(error, _PERMANENT) and not await self._is_opening(peer, wanted, error)
            }
            away = {peer: error for peer, error in found.items() if peer not in wrong}
            policy = retries.WRONG_CONTENT if wrong else retries.NO_PROVIDER
            if not away or attempt >= policy.times:
                break
            pause, reason = policy.pause(attempt), next(iter(away.values()))
            _log.warning("no peer could provide %s, retrying in %.1f s: %s", name, pause, reason)
            await anyio.sleep(pause)
        raise _pull_error(name, wrong, away)

    async def fetch(self, peers: Sequence[PeerId], wanted: WantedFile, target: PurePosixPath) -> FetchedFile:
        """Pull one file, as `pull` does, and put it at `target` of the job's folder when it is complete and checked.

        Raises:
            BridgeError: as `pull`, or `target` cannot be used.
        """
        with self.storage.files.staged() as staged:
            pulled, peer = await self.pull(peers, wanted, staged)
            self.storage.files.publish(staged, target)
        return fetched_file(target, pulled.size, pulled.digest, source=f"peer:{peer}")

    async def _is_opening(self, peer: PeerId, wanted: WantedFile, error: NetError) -> bool:
        """Return whether a peer has refused a slice because it does not serve the dataset, whose manifest it lacks."""
        if not wanted.is_slice or not isinstance(error, TransferRefusedError):
            return False
        dataset = wanted.address.dataset
        request = PullRequest(dataset=dataset, index=0, name="manifest")
        try:
            await transfer.announced_content(self.endpoint, peer, request)
        except NetError as refusal:
            _log.info("%s does not serve %s now: %s", peer, dataset, refusal)
            return True
        return False

    async def pull_once(
        self, peers: Sequence[PeerId], wanted: WantedFile, target: Path
    ) -> tuple[transfer.PullResult, PeerId] | dict[PeerId, NetError]:
        """Pull one file from the first of `peers` that has it; return it and its peer, or the error of each.

        Each is tried as `WantedFile.policy` says, and none again later: the caller knows other ways.

        Raises:
            DiskFaultError: this machine cannot store it.
            BridgeError: the job's storage is used up.
        """
        failures: dict[PeerId, NetError] = {}
        for peer in peers:
            try:
                return await self._pull_through_cache(peer, wanted, target), peer
            except StorageExceededError as error:
                raise to_bridge_error(error) from error
            except (NetError, OSError) as error:
                if (fault := disk_fault_of(error, target.parent)) is not None:
                    raise DiskFaultError(fault) from error
                if isinstance(error, OSError):
                    raise
                failures[peer] = error
        return failures

    async def _pull_through_cache(self, peer: PeerId, wanted: WantedFile, target: Path) -> transfer.PullResult:
        """Take a file from the cache, or pull it from a peer and add it there."""
        if not wanted.is_cached or self.storage.cache is None:
            return await self._pull_from(peer, wanted, target)
        digest = wanted.digest or await self._announced_digest(peer, wanted.address)
        if digest is not None:
            size = await self.storage.take_cached_version(DIGEST, digest, target)
            if size is not None:
                return transfer.PullResult(size, digest)
        pulled = await self._pull_from(peer, wanted, target)
        await self.storage.put_cached_version(DIGEST, pulled.digest, target, CachedVersion(pulled.digest, ""))
        return pulled

    async def _announced_digest(self, peer: PeerId, address: SliceAddress) -> str | None:
        """Ask a peer what a file's digest is, of which the scheduler says none; None if it does not say it either."""
        request = PullRequest(dataset=address.dataset, index=address.index)
        try:
            return (await transfer.announced_content(self.endpoint, peer, request)).digest
        except NetError as error:
            _log.debug("%s does not tell the digest of %s/%d: %s", peer, address.dataset, address.index, error)
            return None

    async def _pull_from(self, peer: PeerId, wanted: WantedFile, target: Path) -> transfer.PullResult:
        address, digest = wanted.address, wanted.digest
        request = PullRequest(dataset=address.dataset, index=address.index)

        async def attempt() -> transfer.PullResult:
            pulled = await transfer.pull(
                self.endpoint, peer, request, target, max_bytes=sys.maxsize, digest=digest, quota=self.storage
            )
            if wanted.check is not None:
                await self.storage.run(wanted.check, target)
            return pulled

        # without a digest, content may have been cut short on its way: another attempt may get all of it
        final = (NoSpaceError,) if digest is None else (NoSpaceError, ContentMismatchError)
        what = f"pull of {address.dataset}/{address.index} from {peer}"
        return await wanted.policy.retry_unless_refused(what, attempt, final)

    async def push(self, reference: PeersReference, content: Path | FileIO, header: PushHeader) -> dict[PeerId, int]:
        """Push a file, by its path or open, to all peers of a reference or to one; return the bytes sent to each.

        Raises:
            BridgeError: with the strategy `All`, one peer did not accept it; with the others, none did.
        """
        if not reference.peers:
            raise bad_request("peers: [] names no receiver: name at least one peer")
        peers = list(reference.peers)
        if isinstance(reference.strategy, All):
            return await self._push_to_all(peers, content, header)
        if isinstance(reference.strategy, Random):
            random.shuffle(peers)
        failures: list[NetError] = []
        for peer in peers:
            try:
                return {peer: await self.push_to(peer, content, header)}
            except NetError as error:
                failures.append(error)
        raise _push_error(header.name, failures)

    async def push_to(self, peer: PeerId, content: Path | FileIO, header: PushHeader) -> int:
        """Push to one peer, with retries; return the bytes sent. Raises `NetError`."""
        name = f"push of {header.name} to {peer}"
        sent = await retries.REQUEST.retry_unless_refused(
            name, lambda: transfer.push(self.endpoint, peer, content, header)
        )
        self.storage.traffic.sent += sent
        return sent

    async def _push_to_all(
        self, peers: Sequence[PeerId], content: Path | FileIO, header: PushHeader
    ) -> dict[PeerId, int]:
        sent: dict[PeerId, int] = {}
        failures: list[NetError] = []

        async def push_one(peer: PeerId) -> None:
            try:
                sent[peer] = await self.push_to(peer, content, header)
            except NetError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(push_one, peer)
        if failures:
            raise _push_error(header.name, failures)
        return sent


def fetched_file(path: PurePosixPath, size: int, checksum: str, **metadata: str) -> FetchedFile:
    """Describe a file that is in the job's folder now, as executors read it."""
    metadata["timestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return FetchedFile(path=str(path), size=size, checksum=checksum, metadata=metadata)


def _push_error(name: str, failures: Sequence[NetError]) -> BridgeError:
    refusals = [failure.reason for failure in failures if isinstance(failure, TransferRefusedError)]
    if len(refusals) == len(failures):
        return PushRefusedError(f"{name}: {'; '.join(map(str, failures))}", refusals)
    return _combined_error(name, failures)


def _pull_error(name: str, wrong: Mapping[PeerId, NetError], away: Mapping[PeerId, NetError]) -> BridgeError:
    if not wrong:
        return _combined_error(name, list(away.values()))
    failures = {peer: str(error) for peer, error in {**wrong, **away}.items()}
    text = "; ".join(f"{peer}: {reason}" for peer, reason in failures.items())
    return UnusableFileError(f"{name} cannot be used: {text}", failures)


def check_tensor_file(path: Path) -> None:
    """Check that a pulled slice, of which no digest is known, is a safetensors file.

    Raises:
        ContentMismatchError: it is not; the file is removed.
    """
    from hypha_proto.safetensors_io import TensorFile  # imports numpy (0.1 s), which most slices do not need

    try:
        TensorFile(path).close()
    except TensorFileError as error:
        path.unlink(missing_ok=True)
        raise ContentMismatchError(f"the slice is not a safetensors file: {error}") from error


def _combined_error(what: str, failures: Sequence[NetError]) -> BridgeError:
    if not failures:
        return bad_request(f"peers: [] names none that could have {what}: name at least one peer")
    if len(failures) == 1:
        return to_bridge_error(failures[0])
    return peer_failed(f"{what}: " + "; ".join(str(failure) for failure in failures))
