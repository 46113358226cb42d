"""Data node service: opens the catalog, serves slices and keeps the datasets announced. Called by `cli`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio.to_thread

from hypha_data.announcer import keep_announced
from hypha_data.catalog import open_catalog
from hypha_data.config import DataConfig
from hypha_data.slice_resolver import slice_resolver
from hypha_net import transfer
from hypha_net.node.lifecycle import Node


async def serve(config: DataConfig, node: Node) -> None:
    """Serve until cancelled; ready once every dataset is announced.

    Raises:
        DatasetError: a configured dataset cannot be served.
    """
    datasets = await anyio.to_thread.run_sync(open_catalog, config.folders)
    with tempfile.TemporaryDirectory(prefix="hypha-data-") as state:
        transfer.serve_pulls(node.endpoint, slice_resolver(datasets, Path(state)))
        await keep_announced(node.endpoint, datasets.values(), node.ready)
