"""Data node service: opens datasets and files, serves them and keeps them announced."""

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
from hypha_data.manifest_watch import find_manifest, wait_for_new_manifest
from hypha_data.provided_files import DIGEST_PREFIX, ProvidedFiles, keep_provided
from hypha_data.slice_resolver import OpenDatasets
from hypha_data.verification import PROGRESS_INTERVAL, SliceVerifier
from hypha_net import transfer
from hypha_net.node.lifecycle import Node
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest, Refusal

_log = logging.getLogger(__name__)


async def serve(config: DataConfig, node: Node) -> None:
    """Serve until cancelled; ready once every dataset and file is announced. None of them waits for another one.

    Raises:
        DatasetError: a configured dataset or file cannot be served.
    """
    datasets, provided = OpenDatasets(config.folders), ProvidedFiles()
    waiting: set[str | Path] = {*config.folders, *config.provide}

    async def resolve(peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        if request.dataset.startswith(DIGEST_PREFIX) and request.dataset not in config.folders:
            return provided.resolve(peer, request)
        return await datasets.resolve(peer, request)

    transfer.serve_pulls(node.endpoint, resolve)

    def on_announced(name: str | Path) -> None:
        waiting.discard(name)
        if not waiting:
            node.readiness.ready()

    async def serve_dataset(name: str, folder: Path) -> None:
        seen = await anyio.to_thread.run_sync(find_manifest, folder)
        verifier = SliceVerifier(await anyio.to_thread.run_sync(_open, name, folder, config.verify))
        while True:
            datasets.add(verifier)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(verifier.keep_verified)
                announced = partial(on_announced, name)
                tasks.start_soon(keep_announced, node.endpoint, verifier, announced, node.readiness.waiting)
                verifier, seen = await wait_for_new_manifest(verifier.dataset, seen)
                tasks.cancel_scope.cancel()
            _log.info("dataset %s: its manifest has changed and is served from now on", name)

    async with anyio.create_task_group() as tasks:
        for name, folder in config.folders.items():
            tasks.start_soon(serve_dataset, name, folder)
        for path in set(config.provide):
            on_read, announced = _progress_log(str(path)), partial(on_announced, path)
            tasks.start_soon(keep_provided, node.endpoint, path, provided, on_read, announced)


def _open(name: str, folder: Path, verify: bool) -> Dataset:
    return open_dataset(name, folder, verify=verify, on_read=_progress_log(f"dataset {name}"))


def _progress_log(name: str) -> OnRead:
    """Return a callback that logs how much was read; it also ends the reading when the node stops."""
    total, logged = 0, time.monotonic()

    def on_read(size: int) -> None:
        nonlocal total, logged
        anyio.from_thread.check_cancelled()
        total += size
        if time.monotonic() - logged >= PROGRESS_INTERVAL:
            logged = time.monotonic()
            _log.info("%s: reading, %.1f GiB so far", name, total / 2**30)

    return on_read
