"""Announces the datasets of this node: one DHT record per dataset, under the dataset's name.

Called by `service` with the datasets of `catalog`; the scheduler finds the records and assigns slices from them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

import anyio

from hypha_data.catalog import Dataset
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


async def keep_announced(endpoint: Endpoint, datasets: Iterable[Dataset], announced: Callable[[], None]) -> None:
    """Announce every dataset repeatedly until cancelled; call `announced` after each full round."""
    datasets = list(datasets)
    while True:
        for dataset in datasets:
            await _announce(endpoint, dataset)
        announced()
        await anyio.sleep(INTERVAL)


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
