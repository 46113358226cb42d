"""Data providers: tracks which data nodes currently provide a job's dataset.

`dataset` pinned the digest of the manifest. Only data nodes that announce this digest are used, so that another dataset
of the same name is never mixed in. `jobs.context` asks for the order of providers when it assigns a slice.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from hypha_net.dataset_directory import find_dataset
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnreachableError
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
"""Seconds between DHT lookups."""
_RETRY_INTERVAL: Final = 1.0
"""Seconds between DHT lookups while no data node is connected."""
_CONNECT_TIMEOUT: Final = 3.0
MAX_PROVIDERS: Final = 16


class Providers:
    """Data nodes that provide one dataset with the pinned manifest."""

    def __init__(self, endpoint: Endpoint, name: str, digest: str | None, first: PeerId) -> None:
        """Start with the data node that sent the manifest.

        Args:
            endpoint: network endpoint of the scheduler.
            name: name of the dataset.
            digest: digest of the manifest; None if the data node has none, then it stays the only provider.
            first: the data node.
        """
        self._endpoint = endpoint
        self._name = name
        self._digest = digest
        self._known: tuple[PeerId, ...] = (first,)
        self._withheld: dict[PeerId, frozenset[int]] = {}

    def order(self, index: int) -> tuple[PeerId, ...]:
        """Return the providers to try for slice `index`, in order: round-robin, connected ones first.

        Those that announce that they do not serve the slice come last: they may serve it again by now.
        """
        connected = self._endpoint.connected_peers()
        start = index % len(self._known)
        rotated = self._known[start:] + self._known[:start]
        return tuple(sorted(rotated, key=lambda peer: (index in self._withheld.get(peer, ()), peer not in connected)))

    @property
    def is_reachable(self) -> bool:
        """Whether a data node of the dataset is connected; True where connections to them are not kept."""
        return self._digest is None or not self._endpoint.connected_peers().keys().isdisjoint(self._known)

    async def watch(self) -> None:
        """Refresh the providers and the connections to them periodically, until cancelled."""
        if self._digest is None:
            return
        while True:
            await self.refresh()
            await anyio.sleep(INTERVAL if self.is_reachable else _RETRY_INTERVAL)

    async def refresh(self) -> None:
        """Look up the providers once and connect to them; unreachable ones come last in `order`."""
        try:
            found = await find_dataset(self._endpoint, self._name)
        except UnreachableError as error:
            _log.info("DHT lookup of the providers of %s failed: %s", self._name, error)
            return
        others = [entry.provider for entry in found if entry.record.manifest != self._digest]
        if others:
            _log.debug("ignoring %d nodes that announce a different dataset named %s", len(others), self._name)
        serving = tuple(entry.provider for entry in found if entry.record.manifest == self._digest)[:MAX_PROVIDERS]
        if not serving:
            _log.warning("no data node announces dataset %s with the manifest %s", self._name, self._digest)
            return
        if set(serving) != set(self._known):
            _log.info("dataset %s is provided by %s", self._name, ", ".join(map(str, serving)))
        self._known = tuple(sorted(serving))
        self._withheld = {entry.provider: frozenset(entry.record.withheld or ()) for entry in found}
        async with anyio.create_task_group() as tasks:
            for peer in self._known:
                tasks.start_soon(self._connect, peer)

    async def _connect(self, peer: PeerId) -> None:
        """Connect to a provider, so that its failure is noticed at once."""
        if peer in self._endpoint.connected_peers():
            return
        try:
            await self._endpoint.connect_peer(peer, timeout=_CONNECT_TIMEOUT)
        except NetError as error:
            _log.info("data node %s is not reachable: %s", peer, error)
