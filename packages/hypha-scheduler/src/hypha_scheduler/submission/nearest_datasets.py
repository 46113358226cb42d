"""Names of the datasets that gateways list, those nearest to an unknown one first. Called by `dataset_check`."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from difflib import SequenceMatcher

import anyio

from hypha_net.dataset_directory import list_datasets
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId

_CANDIDATES = 50
"""Names that share most pairs of letters with the wanted one, which are then compared exactly."""


async def list_names(endpoint: Endpoint, timeout: float) -> set[str] | None:
    """Return the names that the connected gateways list within `timeout` seconds; None if no gateway lists any."""
    names: set[str] = set()
    answered = False

    async def ask(gateway: PeerId) -> None:
        nonlocal answered
        try:
            names.update(dataset.name for dataset in await list_datasets(endpoint, gateway, timeout=timeout))
            answered = True
        except NetError:  # it may not answer: the error then names no datasets
            return

    async with anyio.create_task_group() as tasks:
        for gateway in {peer for peer in endpoint.gateways().values() if peer is not None}:
            tasks.start_soon(ask, gateway)
    return names if answered else None


def nearest(wanted: str, names: Collection[str], count: int) -> list[str]:
    """Return `count` of `names` at most, those that are most similar to `wanted` first."""
    pairs = _pairs(wanted)

    def shared(name: str) -> float:
        others = _pairs(name)
        return len(pairs & others) / (len(pairs) + len(others))

    candidates = heapq.nlargest(_CANDIDATES, sorted(names), key=shared)

    def similarity(name: str) -> float:
        return SequenceMatcher(None, wanted.casefold(), name.casefold()).ratio()

    return sorted(candidates, key=similarity, reverse=True)[:count]


def _pairs(name: str) -> set[str]:
    text = f" {name.casefold()} "
    return {text[at : at + 2] for at in range(len(text) - 1)}
