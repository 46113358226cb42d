"""Serves the outputs that this worker holds to the workers and schedulers that need them: pulls, pushes and releases.

The outputs are in `output_store`. A lease that ends leaves its outputs here; they are removed when their scheduler
releases them, or has not renewed the lease for an hour.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation, retries, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.resources import GIGABYTE
from hypha_proto.task_resources import (
    OutputsReleased,
    PushBegun,
    PushedFile,
    PushOutput,
    ReleaseOutputs,
)
from hypha_proto.texts import quote
from hypha_proto.transfer import TASK_RESOURCE, PullRequest, PushHeader, Refusal
from hypha_worker.leasing.lease_manager import LeaseManager, LeaseState
from hypha_worker.tasks.output_store import HeldOutput, OutputStore

_log = logging.getLogger(__name__)

MAX_PUSHES: Final = 64
"""Requests to push outputs that are served at once; further ones are refused."""
MAX_PUSHED_FILES: Final = 4000
"""Files in one of them; a resource has at most as many."""
_CONCURRENT_PUSHES: Final = 4
_OUTPUT_REQUESTS: Final = instrumentation.Counter(
    "hypha.worker.output.requests",
    "{request}",
    "Requests to pull, push or remove outputs, by kind and outcome; refused are those for outputs that the peer may "
    "not ask for, or that are not here.",
)
_HELD: Final = instrumentation.Level("hypha.worker.outputs.held", "By", "Bytes of outputs that are held for others.")


class OutputServer:
    """Requests for the outputs of one worker."""

    def __init__(
        self, endpoint: Endpoint, store: OutputStore, lease_manager: LeaseManager, tasks: anyio.abc.TaskGroup
    ) -> None:
        """Prepare.

        Args:
            endpoint: pushes outputs.
            store: has them.
            lease_manager: counts the storage of those whose lease is over.
            tasks: pushes run in it.
        """
        self._endpoint = endpoint
        self._store = store
        self._lease_manager = lease_manager
        self._tasks = tasks
        self._pushes = 0
        self._push_places = anyio.CapacityLimiter(_CONCURRENT_PUSHES)
        self._swept = anyio.Event()
        lease_manager.retained_storage = self._retained_storage
        store.on_removed = lambda: lease_manager.on_freed()

    @property
    def held(self) -> tuple[HeldOutput, ...]:
        """Outputs that are held for others."""
        return self._store.held

    # -------------------------------------------------------------------------------------------------------- requests

    async def resolve_pull(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Return a file of an output, or a refusal."""
        found = self._store.resolve(request)
        if isinstance(found, Refusal):
            _log.info("pull by %s refused: %s", peer, found.reason)
        _count_request("pull", not isinstance(found, Refusal))
        return found

    async def push_output(self, scheduler: PeerId, message: PushOutput) -> PushBegun:
        """Push files of outputs to another worker, in the background."""
        if len(message.files) > MAX_PUSHED_FILES:
            return _refuse_push(f"{len(message.files)} files are over the limit of {MAX_PUSHED_FILES} in one request")
        owned = self._store.find_owned(scheduler, message.job_id, ())
        outputs = {held.output.dataset: held for held in owned}
        for file in message.files:
            held = outputs.get(file.dataset)
            if held is None or file.index >= len(held.output.files):
                return _refuse_push(f"this worker has no file {file.index} of {quote(file.dataset)} of that job")
        if message.to == self._endpoint.peer_id:
            return _refuse_push("the files are to be pushed to this worker itself, which has them")
        if self._pushes >= MAX_PUSHES:
            return _refuse_push(f"{MAX_PUSHES} pushes are in progress")
        _count_request("push", is_served=True)
        self._pushes += 1
        self._tasks.start_soon(self._push_files, message, outputs)
        return PushBegun(accepted=True)

    async def _push_files(self, message: PushOutput, outputs: dict[str, HeldOutput]) -> None:
        try:
            async with self._push_places:
                for file in message.files:
                    await self._push_file(message, file, outputs[file.dataset])
        except (NetError, OSError) as error:
            _log.warning("push of outputs to %s failed: %s", message.to, error)
        finally:
            self._pushes -= 1

    async def _push_file(self, message: PushOutput, file: PushedFile, held: HeldOutput) -> None:
        """Push one file; retry also after a refusal, because the receiver may not know of the push yet."""
        stored = held.output.files[file.index]
        header = PushHeader(
            attempt=held.owner.attempt,
            round=0,
            kind=TASK_RESOURCE,
            name=file.name,
            size=stored.size,
            digest=stored.digest,
            delivery=message.delivery,
            scheduler=held.owner.scheduler,
        )
        path = held.file_path(file.index)
        await retries.REQUEST.retry(lambda: transfer.push(self._endpoint, message.to, path, header))

    async def release_outputs(self, scheduler: PeerId, message: ReleaseOutputs) -> OutputsReleased:
        """Remove outputs of a scheduler's job."""
        owned = self._store.find_owned(scheduler, message.job_id, message.datasets)
        _count_request("release", is_served=len(owned) >= len(set(message.datasets)))
        return OutputsReleased(removed=await self._store.remove(owned))

    # ----------------------------------------------------------------------------------------------------- held outputs

    @property
    def has_leased_outputs(self) -> bool:
        """Whether outputs are held whose lease is still renewed: its scheduler may need them."""
        leases = {lease.id for lease in self._lease_manager.leases if lease.state is LeaseState.HELD}
        return any(held.owner.lease in leases for held in self.held)

    async def wait_until_fetched(self) -> None:
        """Wait until no output of a living lease is held."""
        while self.has_leased_outputs:
            await self._swept.wait()

    async def remove_expired(self, now: float) -> None:
        """Remove outputs whose lease was last renewed too long ago."""
        if expired := self._store.expired(now):
            _log.info("removing %d outputs of tasks: their leases were not renewed for an hour", len(expired))
            await self._store.remove(expired)
        if instrumentation.enabled():
            _HELD.set(self._store.bytes_without_lease(()))
        self._swept.set()
        self._swept = anyio.Event()

    def _retained_storage(self) -> float:
        """Return the GB of outputs whose leases are over, and hold no storage any more."""
        if not self.held:
            return 0.0
        leases = {lease.id for lease in self._lease_manager.leases}
        return self._store.bytes_without_lease(leases) / GIGABYTE


def _refuse_push(reason: str) -> PushBegun:
    _count_request("push", is_served=False)
    return PushBegun(accepted=False, reason=reason)


def _count_request(kind: str, is_served: bool) -> None:
    _OUTPUT_REQUESTS.add(1, {"hypha.request": kind, "hypha.outcome": "served" if is_served else "refused"})
