"""Slices that a scheduler assigns: asks for the next ones, pulls them, and reports those that cannot be used."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Final

import anyio
from msgspec.structs import replace

from hypha_net import instrumentation, retries
from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import ASSIGNED, FetchedFile
from hypha_proto.datasets import SAFETENSORS, AssignedSlice, DataRequest, ProviderFailure, UnusableSlice
from hypha_proto.job_spec import SliceAddress
from hypha_proto.texts import shorten
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile, check_tensor_file, request_slices, slice_suffix
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.errors import BridgeError, DiskFaultError, UnusableFileError, peer_failed
from hypha_worker.task_files import safe_name

_log = logging.getLogger(__name__)

MAX_ALTERNATIVES: Final = 8
"""Largest number of alternative providers of a slice that are tried."""
_MAX_PULLS: Final = 4
"""Slices of one request that are pulled at once."""
_Numbered = tuple[AssignedSlice, int | None]
"""A slice, and the number of its assignment."""
_SLICES: Final = instrumentation.Counter("hypha.worker.slices", "{slice}", "Slices that were fetched.")
_SLICE_BYTES: Final = instrumentation.Counter("hypha.worker.slice.io", "By", "Bytes of fetched slices.")
_UNUSABLE: Final = instrumentation.Counter(
    "hypha.worker.slices.unusable", "{slice}", "Assigned slices that no provider had as announced."
)
_SLICE_SECONDS: Final = instrumentation.Histogram(
    "hypha.worker.slice.duration", "s", "From asking for a slice to having it."
)


@dataclass(slots=True)
class AssignedSlices:
    """Fetches the slices that one attempt is assigned."""

    attempt: AttemptId
    files: PeerFiles
    contact: SchedulerContact
    """Waits for the scheduler as long as the job may run on without it."""
    timeout: float = 10.0
    """Seconds that one attempt at asking for slices may take."""
    is_numbered: bool = True
    """Whether the requests are sent one after the other, and what is assigned is numbered, from 0, for the executor.
    The slices themselves are pulled at the same time."""
    _assigned: int = 0
    """Number of slices that were assigned, if they are numbered."""
    _asking: anyio.Lock = field(default_factory=anyio.Lock)
    _names: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    """Numbers in the names of files: a slice may be assigned again."""

    async def fetch(
        self,
        dataset: str,
        folder: PurePosixPath,
        name: str | None = None,
        most: int | None = None,
        *,
        ahead: bool = False,
    ) -> list[FetchedFile]:
        """Fetch the next slices, in the order of their assignment.

        Args:
            dataset: name of the dataset.
            folder: of the work directory.
            name: of the file of a single slice; None gives each slice one of its own, whose suffix tells the format.
            most: number of slices to ask for; None means one.
            ahead: whether the executor is not ready to use them.

        Returns:
            At least one slice. One that cannot be fetched is left out if others can.

        Raises:
            BridgeError: there is none (410) or none is free yet (503), the scheduler refuses or does not answer, or
                too many in a row could not be used (502).
            DiskFaultError, OSError: this machine cannot store them.
        """
        started = anyio.current_time()
        fetched: dict[int, FetchedFile] = {}
        failures: list[BridgeError | OSError] = []
        places = anyio.CapacityLimiter(_MAX_PULLS)

        def name_file(assigned: AssignedSlice) -> PurePosixPath:
            if name:
                return folder / name
            return folder / f"{safe_name(dataset)}-{assigned.index}-{next(self._names)}{slice_suffix(assigned)}"

        async def pull(position: int, numbered: _Numbered) -> None:
            try:
                async with places:
                    fetched[position] = await self._pull_usable(request, numbered, name_file)
            except (BridgeError, OSError) as error:
                failures.append(error)
            else:
                _record(fetched[position], anyio.current_time() - started)

        request = DataRequest(self.attempt, dataset, id=uuid.uuid4(), most=most, ahead=ahead or None)
        assigned = await self._request(request)
        async with anyio.create_task_group() as tasks:
            for position, numbered in enumerate(assigned):
                tasks.start_soon(pull, position, numbered)
        for failure in failures:
            if not fetched or isinstance(failure, DiskFaultError | OSError):
                raise failure
            _log.warning("one of several slices did not come: %s", failure)
        return [fetched[position] for position in sorted(fetched)]

    async def _pull_usable(
        self, first: DataRequest, numbered: _Numbered, name_file: Callable[[AssignedSlice], PurePosixPath]
    ) -> FetchedFile:
        """Pull an assigned slice, or the one that the scheduler assigns in the place of one that cannot be used."""
        detail = ""
        for attempt in range(1 + retries.UNUSABLE_SLICE.times):
            try:
                return await self._pull(first.dataset, *numbered, name_file(numbered[0]))
            except UnusableFileError as error:
                unusable, detail = _unusable_slice(numbered[0], error), error.detail
            _UNUSABLE.add(1)
            if attempt < retries.UNUSABLE_SLICE.times:
                _log.warning("slice %s; asking the scheduler for another one", detail)
                another = replace(first, id=uuid.uuid4(), most=None, unusable=unusable)
                [numbered] = await self._request(another)
        raise peer_failed(f"{1 + retries.UNUSABLE_SLICE.times} slices in a row cannot be used; the last: {detail}")

    async def _request(self, request: DataRequest) -> list[_Numbered]:
        """Ask for slices; return each with its number, if they are numbered."""
        if not self.is_numbered:
            return [(slice_, None) for slice_ in await request_slices(self.contact, request, self.timeout)]
        async with self._asking:
            found = await request_slices(self.contact, request, self.timeout)
            first, self._assigned = self._assigned, self._assigned + len(found)
            return list(zip(found, range(first, self._assigned), strict=True))

    async def _pull(
        self, dataset: str, assigned: AssignedSlice, number: int | None, target: PurePosixPath
    ) -> FetchedFile:
        providers = [assigned.data_provider, *(assigned.others or ())[:MAX_ALTERNATIVES]]
        check = check_tensor_file if assigned.digest is None and assigned.format in (None, SAFETENSORS) else None
        wanted = WantedFile(SliceAddress(dataset=dataset, index=assigned.index), assigned.digest, check, is_slice=True)
        fetched = await self.files.fetch(providers, wanted, target)
        about = {"dataset": dataset, "slice": str(assigned.index), "epoch": str(assigned.epoch or 0)}
        if number is not None:
            about[ASSIGNED] = str(number)
        return replace(fetched, metadata={**fetched.metadata, **about, **_positions(assigned)})


def _positions(assigned: AssignedSlice) -> dict[str, str]:
    """Return the metadata of a part of a slice: between which positions of its order samples are to be used."""
    bounds = {"first": assigned.first, "end": assigned.end}
    return {name: str(position) for name, position in bounds.items() if position is not None}


def _unusable_slice(assigned: AssignedSlice, error: UnusableFileError) -> UnusableSlice:
    """Return the report of a slice that cannot be used, for the scheduler."""
    failures = tuple(ProviderFailure(provider=peer, reason=shorten(why, 400)) for peer, why in error.failures.items())
    return UnusableSlice(index=assigned.index, failures=failures, epoch=assigned.epoch)


def _record(fetched: FetchedFile, seconds: float) -> None:
    about = {"hypha.dataset": fetched.metadata["dataset"]}
    _SLICES.add(1, about)
    _SLICE_BYTES.add(fetched.size, about)
    _SLICE_SECONDS.record(seconds, about)
