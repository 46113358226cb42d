"""Datasets by name, in the DHT: the publisher of a dataset's record is the data node that serves it.

Called by data nodes (`announce_dataset`) and schedulers (`find_dataset`); built on `Endpoint.put_record` and
`find_records`.
"""

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
"""Lifetime of an announcement in seconds; the endpoint renews it while it is open."""


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """A dataset and the data node that serves it."""

    provider: PeerId
    record: DatasetRecord


async def announce_dataset(endpoint: Endpoint, name: str, record: DatasetRecord) -> None:
    """Publish that this endpoint serves the dataset `name`.

    Raises:
        UnreachableError: no gateway stored the record.
    """
    await endpoint.put_record(name.encode(), to_json(DatasetRecord, record), ttl=RECORD_TTL)


async def find_dataset(endpoint: Endpoint, name: str, *, timeout: float = 5.0) -> list[FoundDataset]:
    """Find the data nodes that serve the dataset `name`; empty when none is known.

    Raises:
        UnreachableError: no gateway answered.
    """
    records = await endpoint.find_records(name.encode(), timeout=timeout)
    return [found for record in records if (found := _read(name, record)) is not None]


def _read(name: str, record: Record) -> FoundDataset | None:
    if record.publisher is None:
        _log.warning("record of dataset %s ignored: it names no publisher", name)
        return None
    try:
        return FoundDataset(record.publisher, from_json(DatasetRecord, record.value, MAX_RECORD))
    except DecodeError as error:
        _log.warning("record of dataset %s by %s ignored: %s", name, record.publisher, error)
        return None
