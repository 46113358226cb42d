"""Tell the network what this node has: one DHT record a dataset, under the dataset's name.

Second room on a slice's way: after `catalog`, before the scheduler that finds the record and assigns slices from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import anyio

from hypha_data.catalog import Dataset
from hypha_net import dataset_directory
from hypha_net.endpoint import Endpoint
from hypha_net.errors import UnreachableError
from hypha_proto.datasets import DatasetRecord

_log = logging.getLogger(__name__)

INTERVAL: Final = 900.0
"""Seconds between announcements; the endpoint renews the last one in between, many times."""
RETRY: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts while no directory server takes a record; the last repeats."""


async def keep_announced(endpoint: Endpoint, datasets: Iterable[Dataset], announced: Callable[[], None]) -> None:
    """Announce every dataset, again and again, until cancelled; calls `announced` after the first full round."""
    datasets = list(datasets)
    while True:
        for dataset in datasets:
            await _announce(endpoint, dataset)
        announced()
        await anyio.sleep(INTERVAL)


async def _announce(endpoint: Endpoint, dataset: Dataset) -> None:
    """Announce one dataset, however long it takes until a directory server is there."""
    attempt = 0
    while True:
        # the clock serves as a counter that also grows over restarts; nobody compares it with another clock
        record = DatasetRecord(
            num_slices=len(dataset.manifest.slices), seq=time.time_ns() // 1_000_000, manifest=dataset.digest
        )
        try:
            await dataset_directory.announce_dataset(endpoint, dataset.name, record)
        except UnreachableError as error:
            delay = RETRY[min(attempt, len(RETRY) - 1)]
            _log.warning("dataset %s is not announced yet, again in %g s: %s", dataset.name, delay, error)
            await anyio.sleep(delay)
            attempt += 1
        else:
            _log.info("dataset %s announced: %d slices", dataset.name, record.num_slices)
            return
