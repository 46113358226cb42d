"""Slices that a scheduler assigns one by one: asks for the next, pulls it, and reports those that cannot be used."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

import anyio
from msgspec.structs import replace

from hypha_net import instrumentation, retries
from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import ASSIGNED, FetchedFile
from hypha_proto.datasets import SAFETENSORS, DataRequest, ProviderFailure, SliceAssigned, UnusableSlice
from hypha_proto.job_spec import SliceAddress
from hypha_worker.connectors.peer_files import PeerFiles, check_tensor_file, request_slice, slice_suffix
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import UnusableFileError, peer_failed
from hypha_worker.task_files import safe_name

_log = logging.getLogger(__name__)

MAX_ALTERNATIVES: Final = 8
"""Largest number of alternative providers of a slice that are tried."""
_SLICES: Final = instrumentation.Counter("hypha.worker.slices", "{slice}", "Slices that were fetched.")
_SLICE_BYTES: Final = instrumentation.Counter("hypha.worker.slice.io", "By", "Bytes of fetched slices.")
_UNUSABLE: Final = instrumentation.Counter(
    "hypha.worker.slices.unusable", "{slice}", "Assigned slices that no provider had as announced."
)
_SLICE_SECONDS: Final = instrumentation.Histogram(
    "hypha.worker.slice.duration", "s", "From asking for a slice to having it."
)


@dataclass(slots=True)
class AssignmentOrder:
    """Requests slices of one attempt one after the other, and numbers what is assigned.

    The slices themselves are pulled at the same time.
    """

    assigned: int = 0
    """Number of slices that were assigned."""
    _asking: anyio.Lock = field(default_factory=anyio.Lock)

    async def request(
        self, contact: SchedulerContact, request: DataRequest, timeout: float
    ) -> tuple[SliceAssigned, int]:
        """Call `request_slice` when all earlier requests are answered; return the slice and its number, from 0."""
        async with self._asking:
            found = await request_slice(contact, request, timeout)
            self.assigned += 1
            return found, self.assigned - 1


@dataclass(frozen=True, slots=True)
class AssignedSlices:
    """Fetches the slices that one attempt is assigned."""

    attempt: AttemptId
    files: PeerFiles
    contact: SchedulerContact
    """Waits for the scheduler as long as the job may run on without it."""
    timeout: float = 10.0
    """Seconds that one attempt at asking for a slice may take."""
    order: AssignmentOrder | None = None
    """That of all fetches of the attempt; None states no number of an assignment."""

    async def fetch(self, dataset: str, name_file: Callable[[SliceAssigned], PurePosixPath]) -> FetchedFile:
        """Fetch the next slice.

        Args:
            dataset: name of the dataset.
            name_file: returns where to write a slice, relative to the job's folder.

        Raises:
            BridgeError: there is none (410) or none is free yet (503), the scheduler refuses or does not answer, or
                too many in a row could not be used (502).
        """
        started = anyio.current_time()
        unusable: UnusableSlice | None = None
        detail = ""
        for _ in range(1 + retries.UNUSABLE_SLICE.times):
            request = DataRequest(self.attempt, dataset, id=uuid.uuid4(), unusable=unusable)
            assigned, numbered = await self._request(request)
            try:
                fetched = await self._pull(dataset, assigned, name_file(assigned), numbered)
            except UnusableFileError as error:
                unusable, detail = _unusable_slice(assigned, error), error.detail
                _log.warning("slice %s; asking the scheduler for another one", detail)
                _UNUSABLE.add(1)
            else:
                _record(fetched, anyio.current_time() - started)
                return fetched
        raise peer_failed(f"{1 + retries.UNUSABLE_SLICE.times} slices in a row cannot be used; the last: {detail}")

    async def _request(self, request: DataRequest) -> tuple[SliceAssigned, Mapping[str, str]]:
        """Ask for a slice; return it, and its number as metadata."""
        if self.order is None:
            return await request_slice(self.contact, request, self.timeout), {}
        assigned, number = await self.order.request(self.contact, request, self.timeout)
        return assigned, {ASSIGNED: str(number)}

    async def _pull(
        self, dataset: str, assigned: SliceAssigned, target: PurePosixPath, numbered: Mapping[str, str]
    ) -> FetchedFile:
        address = SliceAddress(dataset=dataset, index=assigned.index)
        providers = [assigned.data_provider, *(assigned.others or ())[:MAX_ALTERNATIVES]]
        check = check_tensor_file if assigned.digest is None and assigned.format in (None, SAFETENSORS) else None
        fetched = await self.files.fetch(providers, address, target, assigned.digest, check=check, is_slice=True)
        about = {"dataset": dataset, "slice": str(assigned.index), "epoch": str(assigned.epoch or 0)}
        return replace(fetched, metadata={**fetched.metadata, **about, **numbered, **_positions(assigned)})


def slice_file_name(dataset: str, assigned: SliceAssigned, number: int) -> str:
    """Return the name of a slice's file; its suffix tells executors the format.

    Args:
        number: makes it unique, because a slice may be assigned again.
    """
    return f"{safe_name(dataset)}-{assigned.index}-{number}{slice_suffix(assigned)}"


def _positions(assigned: SliceAssigned) -> dict[str, str]:
    """Return the metadata of a part of a slice: between which positions of its order samples are to be used."""
    bounds = {"first": assigned.first, "end": assigned.end}
    return {name: str(position) for name, position in bounds.items() if position is not None}


def _unusable_slice(assigned: SliceAssigned, error: UnusableFileError) -> UnusableSlice:
    """Return the report of a slice that cannot be used, for the scheduler."""
    failures = tuple(ProviderFailure(provider=peer, reason=why[:400]) for peer, why in error.failures.items())
    return UnusableSlice(index=assigned.index, failures=failures, epoch=assigned.epoch)


def _record(fetched: FetchedFile, seconds: float) -> None:
    about = {"hypha.dataset": fetched.metadata["dataset"]}
    _SLICES.add(1, about)
    _SLICE_BYTES.add(fetched.size, about)
    _SLICE_SECONDS.record(seconds, about)
