"""Find: datasets by name, in the DHT. The record's publisher is the data node that serves the dataset."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from hypha_net.endpoint import Endpoint, Record
from hypha_proto.codec import from_json, to_json
from hypha_proto.datasets import DatasetRecord
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

MAX_RECORD: Final = 64 << 10
RECORD_TTL: Final = 25.0
"""Seconds that an announcement outlives its data node; the endpoint renews it as long as it is open."""


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """A dataset and who serves it."""

    provider: PeerId
    record: DatasetRecord


async def announce_dataset(endpoint: Endpoint, name: str, record: DatasetRecord) -> None:
    """Publish that this endpoint serves the dataset `name`.

    Raises:
        UnreachableError: no directory server took it.
    """
    await endpoint.put_record(name.encode(), to_json(DatasetRecord, record), ttl=RECORD_TTL)


async def find_dataset(endpoint: Endpoint, name: str, *, timeout: float = 5.0) -> list[FoundDataset]:
    """Who serves the dataset `name`; empty when nobody is known to.

    Raises:
        UnreachableError: no directory server could be asked.
    """
    records = await endpoint.find_records(name.encode(), timeout=timeout)
    return [found for record in records if (found := _read(name, record)) is not None]


def _read(name: str, record: Record) -> FoundDataset | None:
    if record.publisher is None:
        _log.warning("record of dataset %s names no publisher and is left out", name)
        return None
    try:
        return FoundDataset(record.publisher, from_json(DatasetRecord, record.value, MAX_RECORD))
    except DecodeError as error:
        _log.warning("record of dataset %s by %s is left out: %s", name, record.publisher, error)
        return None
