"""Announces the datasets of this node: one DHT record per dataset, under the dataset's name.

Called by `service`; the scheduler finds the records and assigns slices from them. Calls `verification`, as a dataset is
announced when one of its slices can be served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import anyio

from hypha_data.catalog import Dataset
from hypha_data.verification import SliceVerifier
from hypha_net import dataset_directory
from hypha_net.backoff import jittered
from hypha_net.endpoint import Endpoint
from hypha_net.errors import UnreachableError
from hypha_proto.datasets import DatasetRecord

_log = logging.getLogger(__name__)

INTERVAL: Final = 900.0
"""Seconds between announcements; in between the endpoint renews the last one repeatedly."""
RETRY: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts while no directory server accepts a record, with jitter; the last repeats."""
RECHECK: Final = 10.0
"""Seconds between checks of a dataset of which no slice can be served."""


async def keep_announced(
    endpoint: Endpoint, verifier: SliceVerifier, announced: Callable[[], None], waiting: Callable[[str], None]
) -> None:
    """Announce a dataset repeatedly until cancelled; call `announced` each time.

    A dataset of which no slice can be served is announced as soon as one can; until then `waiting` gets the reason.
    """
    while True:
        await _wait_for_usable_slice(verifier, waiting)
        await _announce(endpoint, verifier.dataset)
        announced()
        await anyio.sleep(INTERVAL)


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


async def _announce(endpoint: Endpoint, dataset: Dataset) -> None:
    """Announce one dataset; retry until a directory server accepts the record."""
    attempt = 0
    while True:
        # the clock serves as a counter that also increases across restarts; it is not compared with other clocks
        record = DatasetRecord(
            num_slices=len(dataset.manifest.slices), seq=time.time_ns() // 1_000_000, manifest=dataset.digest
        )
        try:
            await dataset_directory.announce_dataset(endpoint, dataset.name, record)
        except UnreachableError as error:
            delay = jittered(RETRY, attempt)
            _log.warning("dataset %s is not announced yet, trying again in %.1f s: %s", dataset.name, delay, error)
            await anyio.sleep(delay)
            attempt += 1
        else:
            _log.info("dataset %s announced: %d slices", dataset.name, record.num_slices)
            return
