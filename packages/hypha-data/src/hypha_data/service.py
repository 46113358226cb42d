"""Data node service: opens the datasets, serves their slices and keeps them announced. Called by `cli`."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread

from hypha_data.announcer import keep_announced
from hypha_data.catalog import Dataset, open_dataset
from hypha_data.config import DataConfig
from hypha_data.digest_cache import OnRead
from hypha_data.slice_resolver import OpenDatasets, slice_resolver
from hypha_data.verification import PROGRESS_INTERVAL, SliceVerifier
from hypha_net import transfer
from hypha_net.node.lifecycle import Node

_log = logging.getLogger(__name__)


async def serve(config: DataConfig, node: Node) -> None:
    """Serve until cancelled; ready once every dataset is announced. A dataset never waits for another one.

    Raises:
        DatasetError: a configured dataset cannot be served.
    """
    datasets = OpenDatasets(config.folders)
    waiting = set(config.folders)
    transfer.serve_pulls(node.endpoint, slice_resolver(datasets))

    def on_announced(name: str) -> None:
        waiting.discard(name)
        if not waiting:
            node.ready()

    async def serve_dataset(name: str, folder: Path) -> None:
        dataset = await anyio.to_thread.run_sync(_open, name, folder, config.verify)
        verifier = SliceVerifier(dataset)
        datasets.add(verifier)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(verifier.keep_verified)
            announce = partial(keep_announced, node.endpoint, verifier, lambda: on_announced(name), node.waiting)
            tasks.start_soon(announce)

    async with anyio.create_task_group() as tasks:
        for name, folder in config.folders.items():
            tasks.start_soon(serve_dataset, name, folder)


def _open(name: str, folder: Path, verify: bool) -> Dataset:
    return open_dataset(name, folder, verify=verify, on_read=_progress_log(name))


def _progress_log(name: str) -> OnRead:
    """Return a callback that logs how much was read; it also ends the reading when the node stops."""
    total, logged = 0, time.monotonic()

    def on_read(size: int) -> None:
        nonlocal total, logged
        anyio.from_thread.check_cancelled()
        total += size
        if time.monotonic() - logged >= PROGRESS_INTERVAL:
            logged = time.monotonic()
            _log.info("dataset %s: reading its slices, %.1f GiB so far", name, total / 2**30)

    return on_read
