"""Datasets that gateways list, and the names nearest to an unknown one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

import anyio

from hypha_net.dataset_directory import list_datasets
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.dataset_listing import ListedDataset
from hypha_proto.ids import PeerId


async def list_known(endpoint: Endpoint, timeout: float) -> Mapping[str, ListedDataset] | None:
    """Return by name the datasets that the connected gateways list within `timeout` seconds; None if none lists any."""
    found: dict[str, ListedDataset] = {}
    answered = False

    async def ask(gateway: PeerId) -> None:
        nonlocal answered
        try:
            found.update({each.name: each for each in await list_datasets(endpoint, gateway, timeout=timeout)})
            answered = True
        except NetError:  # it may not answer: the datasets of the others are returned
            return

    async with anyio.create_task_group() as tasks:
        for gateway in {peer for peer in endpoint.gateways().values() if peer is not None}:
            tasks.start_soon(ask, gateway)
    return found if answered else None


def nearest(wanted: str, names: Collection[str], count: int) -> list[str]:
    """Return `count` of `names` at most, those that are most similar to `wanted` first."""
    folded = {name.casefold(): name for name in sorted(names)}
    return [folded[name] for name in get_close_matches(wanted.casefold(), folded, count, cutoff=0.0)]
