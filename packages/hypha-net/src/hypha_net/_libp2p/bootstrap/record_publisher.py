"""Keeps this node's DHT records published: renewed before they expire, and sent to each gateway that connects."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio

from hypha_net._libp2p.kad.client import KadClient
from hypha_net.errors import UnreachableError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.gateways")

MAX_RENEWAL_INTERVAL: Final = 600.0
"""Seconds after which a record is put again at the latest; earlier if a third of its lifetime is less."""


@dataclass(slots=True)
class _PublishedRecord:
    value: bytes
    ttl: float
    put_at: float
    """When it was last put at all gateways, or was due to be."""

    @property
    def due_at(self) -> float:
        return self.put_at + min(MAX_RENEWAL_INTERVAL, max(0.5, self.ttl / 3))


class RecordPublisher:
    """The records that one node has published."""

    def __init__(self, dht: KadClient) -> None:
        self._dht = dht
        self._records: dict[bytes, _PublishedRecord] = {}
        self._added = anyio.Event()
        self._locks: dict[bytes, anyio.Lock] = {}
        """Serializes the puts of a key: an older value must not arrive after a newer one."""

    async def publish(self, key: bytes, value: bytes, ttl: float) -> None:
        """Publish a record, and keep it published. Raises `UnreachableError` when no gateway stored it."""
        self._records[key] = _PublishedRecord(value, ttl, anyio.current_time())
        self._added.set()
        await self._put(key, None)

    async def publish_to(self, gateway: PeerId) -> None:
        """Put every record at one gateway."""
        await self._put_all(list(self._records), [gateway])

    async def renew_due(self) -> None:
        """Put the records that are due at every gateway."""
        now = anyio.current_time()
        due = [key for key, record in self._records.items() if record.due_at <= now]
        for key in due:
            self._records[key].put_at = now
        await self._put_all(due, None)

    async def wait_until_due(self) -> None:
        """Sleep until a record is due; a record that is added meanwhile may be due earlier."""
        while True:
            due_at = min((record.due_at for record in self._records.values()), default=float("inf"))
            left = due_at - anyio.current_time()
            if left <= 0:
                return
            self._added = anyio.Event() if self._added.is_set() else self._added
            with anyio.move_on_after(left):
                await self._added.wait()

    async def _put_all(self, keys: Iterable[bytes], gateways: Sequence[PeerId] | None) -> None:
        for key in keys:
            try:
                await self._put(key, gateways)
            except UnreachableError as error:
                _log.warning("record %r was not published: %s", key, error)

    async def _put(self, key: bytes, gateways: Sequence[PeerId] | None) -> None:
        async with self._locks.setdefault(key, anyio.Lock()):
            record = self._records[key]
            await self._dht.put(key, record.value, record.ttl, gateways)
