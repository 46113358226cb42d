"""Announces the datasets of this node: one DHT record per dataset, under the dataset's name.

The scheduler finds the records and assigns slices from them. Calls `verification`, as a dataset is announced when one
of its slices can be served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import anyio

from hypha_data.verification import SliceVerifier
from hypha_net import dataset_directory, retries
from hypha_net.endpoint import Endpoint
from hypha_proto.datasets import DatasetRecord

_log = logging.getLogger(__name__)

INTERVAL: Final = 900.0
"""Seconds between announcements; in between the endpoint renews the last one repeatedly."""
SETTLE: Final = 1.0
"""Seconds between a change of the slices that can be served and the next announcement, which covers further changes."""
MAX_WITHHELD: Final = 1000
"""Slices that an announcement names as not served; requests for others of them are refused."""
RECHECK: Final = 10.0
"""Seconds between checks of a dataset of which no slice can be served."""


async def keep_announced(
    endpoint: Endpoint, verifier: SliceVerifier, announced: Callable[[], None], waiting: Callable[[str], None]
) -> None:
    """Announce a dataset until cancelled, again when other slices can be served; call `announced` each time.

    The first announcement waits until a slice can be served; if none can, `waiting` gets the reason.
    """
    await _wait_for_usable_slice(verifier, waiting)
    while True:
        withheld = await _announce(endpoint, verifier)
        announced()
        with anyio.move_on_after(INTERVAL):
            await verifier.wait_until_not(withheld)
            await anyio.sleep(SETTLE)


async def _wait_for_usable_slice(verifier: SliceVerifier, waiting: Callable[[str], None]) -> None:
    if await verifier.find_usable():
        return
    dataset = verifier.dataset
    reason = f"dataset {dataset.name} is not announced: none of its {len(dataset.manifest.slices)} slices can be served"
    _log.error("%s; they are checked again every %g s", reason, RECHECK)
    waiting(reason)
    while True:
        await anyio.sleep(RECHECK)
        if await verifier.find_usable():
            return


async def _announce(endpoint: Endpoint, verifier: SliceVerifier) -> frozenset[int]:
    """Announce one dataset until a directory server accepts the record; return the slices that are withheld."""
    dataset = verifier.dataset

    async def announce() -> frozenset[int]:
        withheld = verifier.withheld
        # the clock serves as a counter that also increases across restarts; it is not compared with other clocks
        record = DatasetRecord(
            num_slices=len(dataset.manifest.slices),
            seq=time.time_ns() // 1_000_000,
            manifest=dataset.digest,
            withheld=tuple(sorted(withheld)[:MAX_WITHHELD]) or None,
        )
        await dataset_directory.announce_dataset(endpoint, dataset.name, record)
        return withheld

    withheld = await retries.ANNOUNCEMENT.retry_unreachable(f"dataset {dataset.name} is not announced yet", announce)
    but = f", {len(withheld)} of them not served" if withheld else ""
    _log.info("dataset %s announced: %d slices%s", dataset.name, len(dataset.manifest.slices), but)
    return withheld
