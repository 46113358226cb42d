"""Datasets by name over the network in memory."""

from __future__ import annotations

from support.memory_pair import memory_pair

from hypha_net import dataset_directory
from hypha_proto.datasets import DatasetRecord


async def test_datasets_are_found_by_name_with_their_provider() -> None:
    async with memory_pair() as (a, b):
        await dataset_directory.announce_dataset(a, "digits", DatasetRecord(num_slices=4))
        await b.put_record(b"digits", b"not json")
        [found] = await dataset_directory.find_dataset(b, "digits")
        assert (found.provider, found.record.num_slices) == (a.peer_id, 4)
        assert await dataset_directory.find_dataset(b, "unknown") == []
