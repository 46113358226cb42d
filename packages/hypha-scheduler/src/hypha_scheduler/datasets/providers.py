"""Who serves a job's dataset right now: several data nodes may, and any of them may come or go.

After `dataset`, which pinned the digest of the manifest: only who announces that very digest is asked for slices, so a
dataset that merely has the same name is never mixed in. Before `strategies.diloco.slices`' answers: each slice is sent
with the node to pull it from first, and the others.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio

from hypha_net import rpc
from hypha_net.dataset_directory import find_dataset
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnreachableError
from hypha_proto.health import HEALTH_CHECK, HealthRequest
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
"""Seconds between questions to the directory."""
_CONNECT_TIMEOUT: Final = 3.0
MAX_PROVIDERS: Final = 16


class Providers:
    """The data nodes that serve one dataset, as its job pinned it."""

    def __init__(self, endpoint: Endpoint, name: str, digest: str | None, first: PeerId) -> None:
        """Begin with the node that gave the manifest.

        Args:
            digest: of the manifest; none where the data node keeps none, which leaves the job with that one node.
        """
        self._endpoint = endpoint
        self._name = name
        self._digest = digest
        self._known: tuple[PeerId, ...] = (first,)

    def order(self, index: int) -> tuple[PeerId, ...]:
        """Whom to ask for slice `index`: those that are connected first, taking turns."""
        connected = self._endpoint.connected_peers()
        turn = index % len(self._known)
        turned = self._known[turn:] + self._known[:turn]
        return tuple(sorted(turned, key=lambda peer: peer not in connected))

    async def watch(self) -> None:
        """Keep up with who announces the dataset, and stay connected to them, until cancelled."""
        if self._digest is None:
            return
        while True:
            await self.refresh()
            await anyio.sleep(INTERVAL)

    async def refresh(self) -> None:
        """Ask the directory once; who does not answer any more is asked last."""
        try:
            found = await find_dataset(self._endpoint, self._name)
        except UnreachableError as error:
            _log.info("the directory cannot be asked who serves %s: %s", self._name, error)
            return
        others = [entry.provider for entry in found if entry.record.manifest != self._digest]
        if others:
            _log.debug("%d nodes announce another dataset called %s, and are left out", len(others), self._name)
        serving = tuple(entry.provider for entry in found if entry.record.manifest == self._digest)[:MAX_PROVIDERS]
        if not serving:
            _log.warning("nobody announces dataset %s as this job pinned it: %s", self._name, self._digest)
            return
        if set(serving) != set(self._known):
            _log.info("dataset %s is served by %s", self._name, ", ".join(map(str, serving)))
        self._known = tuple(sorted(serving))
        async with anyio.create_task_group() as tasks:
            for peer in self._known:
                tasks.start_soon(self._connect, peer)

    async def _connect(self, peer: PeerId) -> None:
        """A connection is how the end of a data node is noticed at once."""
        if peer in self._endpoint.connected_peers():
            return
        try:
            await rpc.call(self._endpoint, peer, HEALTH_CHECK, HealthRequest(), timeout=_CONNECT_TIMEOUT)
        except NetError as error:
            _log.info("data node %s does not answer: %s", peer, error)
