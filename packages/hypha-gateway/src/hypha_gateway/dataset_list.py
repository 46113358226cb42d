"""List of the datasets that data nodes announce to this gateway, made from the DHT records that it stores.

A data node puts the record of a dataset at every gateway that it is connected to, and renews it until it ends; so a
gateway knows the datasets of the data nodes that are connected to it. The record store accepts a record from its
publisher only and limits the number of records of each. What a record says is not verified. Served by `service`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import anyio
import anyio.lowlevel

from hypha_net.endpoint import Endpoint, Record
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_proto.codec import from_json
from hypha_proto.dataset_listing import MAX_PAGE, DatasetPage, ListDatasets, ListedDataset, is_listable
from hypha_proto.datasets import DatasetRecord
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import confirmed_key, split_heartbeat

MIN_AGE: Final = 1.0
"""Seconds for which a list is used at least, and at least `REST` times the duration of making it."""
REST: Final = 10.0
PAGE_INTERVAL: Final = 0.02
"""Seconds that each page of one peer takes at least; its pages are answered one after the other."""
_STEP: Final = 64
"""Records that are read before other tasks run."""


class DatasetList:
    """Answers requests for the list of datasets; the list is made again when it is asked for and has become old."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._limiter = PerPeerLimiter(1)
        self._making = anyio.Lock()
        self._datasets: Sequence[ListedDataset] = ()
        self._old_at = float("-inf")
        """When the list is made again."""

    async def answer(self, peer: PeerId, request: ListDatasets) -> DatasetPage:
        """Return the page that `peer` asks for."""
        async with self._limiter.acquire(peer):
            await anyio.sleep(PAGE_INTERVAL)
            datasets = await self._current()
        name = attrgetter("name")
        first = 0 if request.after is None else bisect_right(datasets, request.after, key=name)
        limit = MAX_PAGE if request.limit is None else min(max(1, request.limit), MAX_PAGE)
        page = tuple(datasets[first : first + limit])
        return DatasetPage(datasets=page, next=page[-1].name if first + limit < len(datasets) else None)

    async def _current(self) -> Sequence[ListedDataset]:
        async with self._making:
            began = anyio.current_time()
            if began >= self._old_at:
                self._datasets = await self._make()
                ended = anyio.current_time()
                self._old_at = ended + max(MIN_AGE, REST * (ended - began))
            return self._datasets

    async def _make(self) -> list[ListedDataset]:
        announced: defaultdict[str, list[tuple[PeerId, DatasetRecord]]] = defaultdict(list)
        for number, record in enumerate(self._endpoint.stored_records()):
            if number % _STEP == 0:
                await anyio.lowlevel.checkpoint()
            if (name := _dataset_name(record.key)) is None or record.publisher is None:
                continue
            if (said := _read(record)) is not None:
                announced[name].append((record.publisher, said))
        return [_listed(name, announced[name]) for name in sorted(announced)]


def _listed(name: str, announced: Sequence[tuple[PeerId, DatasetRecord]]) -> ListedDataset:
    """Return what the records of one name say."""
    newest = max((record for _, record in announced), key=lambda record: record.seq or 0)
    return ListedDataset(
        name=name,
        num_slices=newest.num_slices,
        providers=len({publisher for publisher, _ in announced}),
        manifests=len({record.manifest for _, record in announced}),
        manifest=newest.manifest,
    )


def _dataset_name(key: bytes) -> str | None:
    """Return the name of the dataset whose record has this key, or None if it is not one that can be listed."""
    try:
        name = confirmed_key(key).decode()
    except UnicodeDecodeError:
        return None
    return name if is_listable(name) else None


def _read(record: Record) -> DatasetRecord | None:
    """Return what a record says, or None if it is not a dataset's, as that of a single file."""
    is_heartbeat = confirmed_key(record.key) != record.key
    value = split_heartbeat(record.value)[1] if is_heartbeat else record.value
    try:
        read: DatasetRecord = from_json(DatasetRecord, value)
    except DecodeError:
        return None
    return read
