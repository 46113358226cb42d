"""Datasets by name, in the DHT: the publisher of a dataset's record is the data node that serves it.

Data nodes call `announce_dataset`, schedulers `find_dataset`. `list_datasets` asks one gateway for the names that it
knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import anyio

from hypha_net import rpc
from hypha_net.endpoint import Endpoint, Record
from hypha_net.errors import RequestError, RequestTimeoutError
from hypha_proto.codec import from_json, to_json
from hypha_proto.dataset_listing import LIST_DATASETS, MAX_PAGE, DatasetPage, ListDatasets, ListedDataset, is_listable
from hypha_proto.datasets import DatasetRecord
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.wire_schema import Message

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

RECORD_TTL: Final = 25.0
"""Lifetime of an announcement in seconds; the endpoint renews it while it is open."""
MAX_LISTED: Final = 50_000
"""Maximum number of datasets that one gateway may list; it stores fewer records."""


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
    return [FoundDataset(*found) for found in read_records(DatasetRecord, records, f"dataset {name}")]


def read_records(kind: type[M], records: Iterable[Record], what: str) -> Iterator[tuple[PeerId, M]]:
    """Yield publisher and content of each record; log those of `what` that are unusable."""
    for record in records:
        if record.publisher is None:
            _log.warning("record of %s ignored: it names no publisher", what)
            continue
        try:
            yield record.publisher, from_json(kind, record.value)
        except DecodeError as error:
            _log.warning("record of %s by %s ignored: %s", what, record.publisher, error)


async def list_datasets(endpoint: Endpoint, gateway: PeerId, *, timeout: float = 10.0) -> list[ListedDataset]:
    """Return the datasets that data nodes announce to a gateway, by name; reads all pages.

    Args:
        timeout: seconds for all pages together.

    Raises:
        UnsupportedProtocolError: the gateway cannot list datasets.
        UnreachableError: the gateway cannot be reached.
        RequestError: it did not answer in time, or its answer is malformed.
    """
    found: list[ListedDataset] = []
    after: str | None = None
    try:
        with anyio.fail_after(timeout):
            while True:
                request = ListDatasets(after=after)
                page = await rpc.call(endpoint, gateway, LIST_DATASETS, request, timeout=timeout)
                if (fault := _find_fault(page, after)) is not None or len(found) > MAX_LISTED - MAX_PAGE:
                    raise RequestError(f"the list of gateway {gateway} is malformed: {fault or 'it does not end'}")
                found += page.datasets
                if page.next is None:
                    return found
                after = page.next
    except TimeoutError:
        raise RequestTimeoutError(f"gateway {gateway}: no whole list within {timeout:g} s") from None


def _find_fault(page: DatasetPage, after: str | None) -> str | None:
    """Return what is wrong with a page of the list, or None."""
    names = [dataset.name for dataset in page.datasets]
    if len(names) > MAX_PAGE:
        return f"a page of {len(names)} datasets, more than {MAX_PAGE}"
    if not all(map(is_listable, names)):
        return "a name that is empty, too long or not printable"
    order = names if after is None else [after, *names]
    if any(first >= second for first, second in pairwise(order)):
        return "names out of order"
    if page.next is not None and (not names or page.next != names[-1]):
        return "a next page that does not begin after this one"
    return None
