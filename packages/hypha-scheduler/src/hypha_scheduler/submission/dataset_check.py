"""Check at submission that data nodes announce the datasets of a job, with columns that it can use."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
import anyio.to_thread

from hypha_net.dataset_directory import find_dataset
from hypha_net.endpoint import Endpoint
from hypha_net.errors import UnreachableError
from hypha_proto.datasets import MANIFEST
from hypha_scheduler.datasets.dataset import open_dataset
from hypha_scheduler.errors import JobFailedError, JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.submission.node_directory import list_known
from hypha_scheduler.submission.node_list import nearest

DATASET_TIMEOUT: Final = 8.0
"""Seconds until a data node must have announced a dataset."""
_PAUSES: Final = (0.25, 2.0)
"""Shortest and longest pause in seconds between two lookups of a dataset; each is twice the one before."""
_LOOKUPS: Final = 16
"""Lookups at a time."""
_LIST_TIMEOUT: Final = 3.0
"""Seconds before the end of the wait in which gateways are asked for the datasets that they know."""
_MAX_LISTED: Final = 10
"""Names of known datasets in the error."""


async def check_datasets(endpoint: Endpoint, job: JobTable) -> None:
    """Wait until every dataset of a job is announced, and compare what its manifest says with what the job needs.

    A manifest that no data node gives within this time is compared when the job begins.

    Raises:
        JobRefusedError: one is not announced within `DATASET_TIMEOUT` seconds, or the job cannot use it.
    """
    missing, lookups = set(job.dataset_names), anyio.CapacityLimiter(_LOOKUPS)
    listed: Collection[str] | None = None
    faults: dict[str, list[str]] = {}

    async def list_if_missing() -> None:
        nonlocal listed
        await anyio.sleep(DATASET_TIMEOUT - _LIST_TIMEOUT)
        listed = await list_known(endpoint, _LIST_TIMEOUT - 0.5)

    async def check(name: str) -> None:
        await _wait_until_announced(endpoint, name, missing, lookups)
        async with lookups:
            faults[name] = await _find_faults(endpoint, job, name)

    with anyio.move_on_after(DATASET_TIMEOUT):
        async with anyio.create_task_group() as listing:
            listing.start_soon(list_if_missing)
            async with anyio.create_task_group() as checks:
                for name in job.dataset_names:
                    checks.start_soon(check, name)
            listing.cancel_scope.cancel()
    lines = [line for name in job.dataset_names for line in faults.get(name, ())]
    if missing:
        names = ", ".join(repr(name) for name in sorted(missing))
        lines.append(
            f"dataset {names}: no data node announces it; correct the name, or start a data node that serves it"
            + await _known_names(min(missing), listed)
        )
    if lines:
        raise JobRefusedError("\n".join(lines))


async def _find_faults(endpoint: Endpoint, job: JobTable, name: str) -> list[str]:
    with TemporaryDirectory(prefix="hypha-") as folder:
        try:
            dataset = await open_dataset(endpoint, name, Path(folder) / MANIFEST, timeout=0)
        except JobFailedError:  # no data node gives the manifest now; it may when the job begins
            return []
    return job.dataset_faults(dataset)


async def _known_names(wanted: str, listed: Collection[str] | None) -> str:
    """Return the end of the error: the names nearest to `wanted` of those that gateways list."""
    if listed is None:
        return ""  # no connected gateway can list datasets
    if not listed:
        return "; the gateways know no dataset"
    shown = await anyio.to_thread.run_sync(nearest, wanted, listed, _MAX_LISTED)
    more = f" and {len(listed) - len(shown)} more" if len(listed) > len(shown) else ""
    return f"; the gateways know {', '.join(map(repr, shown))}{more}"


async def _wait_until_announced(
    endpoint: Endpoint, name: str, missing: set[str], lookups: anyio.CapacityLimiter
) -> None:
    pause, longest = _PAUSES
    while True:
        try:
            async with lookups:
                found = await find_dataset(endpoint, name, timeout=DATASET_TIMEOUT)
        except UnreachableError:
            found = []  # no gateway answers now
        if found:
            missing.discard(name)
            return
        await anyio.sleep(pause)
        pause = min(2 * pause, longest)
