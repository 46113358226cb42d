"""Data providers: a job uses reachable data nodes with the pinned manifest, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from blake3 import blake3

from hypha_net import dataset_directory, rpc, transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.codec import to_json
from hypha_proto.datasets import DatasetRecord, Manifest, SliceEntry
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.datasets.dataset import open_dataset
from hypha_scheduler.datasets.providers import Providers
from hypha_scheduler.errors import JobFailedError

pytestmark = [pytest.mark.usefixtures("inline_threads"), pytest.mark.virtual_clock]

DIGEST = "blake3:" + "1" * 64
ENTRY = SliceEntry(file="0.safetensors", samples=4, size=1, digest=DIGEST)


@asynccontextmanager
async def nodes(names: str, network: MemoryNetwork | None = None) -> AsyncIterator[list[MemoryEndpoint]]:
    async with AsyncExitStack() as stack:
        network = network or MemoryNetwork(seed=3)
        yield [await stack.enter_async_context(network.endpoint(name)) for name in names]


async def healthy(_peer: PeerId, _request: HealthRequest) -> Health:
    return Health(healthy=True)


async def serve(node: MemoryEndpoint, slices: int, folder: Path, **fields: Any) -> str:
    """Serve and announce a dataset with `slices` slices; return the digest of its manifest."""
    data = to_json(Manifest, Manifest(dataset="digits", slices=(ENTRY,) * slices, **fields))
    path = folder / f"{slices}.json"
    path.write_bytes(data)
    digest = f"blake3:{blake3(data).hexdigest()}"

    async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(path, digest) if request.name == "manifest" else Refusal(reason="not in this test")

    transfer.serve_pulls(node, resolve)
    rpc.serve(node, HEALTH_CHECK, healthy)
    await dataset_directory.announce_dataset(
        node, "digits", DatasetRecord(num_slices=slices, seq=slices, manifest=digest)
    )
    return digest


async def test_providers_of_the_pinned_manifest_are_used_round_robin(tmp_path: Path) -> None:
    async with nodes("abos") as (a, b, other, scheduler):
        digest = await serve(a, 2, tmp_path)
        assert await serve(b, 2, tmp_path) == digest
        found = await open_dataset(scheduler, "digits", tmp_path / "manifest.json", timeout=5)
        assert found.pinned == digest
        await serve(other, 3, tmp_path)  # a newer dataset of the same name
        providers = Providers(scheduler, "digits", found.pinned, found.provider)
        assert providers.order(0) == (found.provider,)
        await providers.refresh()
        assert {providers.order(0), providers.order(1)} == {
            (a.peer_id, b.peer_id),
            (b.peer_id, a.peer_id),
        }
        assert {a.peer_id, b.peer_id} <= set(scheduler.connected_peers())


async def test_format_columns_and_classes_are_those_of_the_manifest(tmp_path: Path) -> None:
    async with nodes("as") as (a, scheduler):
        await serve(a, 2, tmp_path)
        tensors = await open_dataset(scheduler, "digits", tmp_path / "manifest.json", timeout=5)
        assert (tensors.format, tensors.columns, tensors.labels) == (None, None, None)
        await serve(a, 3, tmp_path, format="jsonl", columns={"prompt": "text"}, labels=("bad", "good"))
        rows = await open_dataset(scheduler, "digits", tmp_path / "manifest.json", timeout=5)
        assert (rows.format, rows.columns, rows.labels) == ("jsonl", {"prompt": "text"}, ("bad", "good"))
        await serve(a, 4, tmp_path, format="parquet")
        with pytest.raises(JobFailedError, match="format 'parquet', and this scheduler knows safetensors, jsonl"):
            await open_dataset(scheduler, "digits", tmp_path / "manifest.json", timeout=5)


async def test_a_provider_that_withholds_a_slice_comes_last_for_it(tmp_path: Path) -> None:
    async with nodes("abs") as (a, b, scheduler):
        digest = await serve(a, 4, tmp_path)
        await serve(b, 4, tmp_path)
        record = DatasetRecord(num_slices=4, seq=9, manifest=digest, withheld=(1, 2))
        await dataset_directory.announce_dataset(a, "digits", record)
        providers = Providers(scheduler, "digits", digest, a.peer_id)
        await providers.refresh()
        assert [providers.order(index)[0] for index in (1, 2)] == [b.peer_id] * 2
        assert {providers.order(index)[0] for index in (0, 3)} == {a.peer_id, b.peer_id}
        assert all(len(providers.order(index)) == 2 for index in range(4))
        await dataset_directory.announce_dataset(a, "digits", DatasetRecord(num_slices=4, seq=10, manifest=digest))
        await providers.refresh()
        assert {providers.order(index)[0] for index in (1, 2)} == {a.peer_id, b.peer_id}


async def test_lost_provider_moves_last_and_is_then_removed(tmp_path: Path) -> None:
    network = MemoryNetwork(seed=3)
    async with nodes("as", network) as (a, scheduler):
        digest = await serve(a, 2, tmp_path)
        providers = Providers(scheduler, "digits", digest, a.peer_id)
        async with network.endpoint("b") as b:
            await serve(b, 2, tmp_path)
            await providers.refresh()
            assert {providers.order(n)[0] for n in range(2)} == {a.peer_id, b.peer_id}
        assert [providers.order(n)[0] for n in range(4)] == [a.peer_id] * 4
        await anyio.sleep(dataset_directory.RECORD_TTL + 1)
        await providers.refresh()
        assert providers.order(0) == (a.peer_id,)


async def test_a_dataset_is_reachable_while_one_of_its_data_nodes_is(tmp_path: Path) -> None:
    network = MemoryNetwork(seed=3)
    async with network.endpoint("s") as scheduler:
        async with network.endpoint("a") as a:
            digest = await serve(a, 2, tmp_path)
            providers = Providers(scheduler, "digits", digest, a.peer_id)
            async with network.endpoint("b") as b:
                await serve(b, 2, tmp_path)
                await providers.refresh()
                assert providers.is_reachable
            assert providers.is_reachable
        assert not providers.is_reachable
        assert len(providers.order(0)) == 2  # they may come back


async def test_dataset_without_a_digest_keeps_its_only_provider(tmp_path: Path) -> None:
    async with nodes("abs") as (a, b, scheduler):
        await dataset_directory.announce_dataset(a, "digits", DatasetRecord(num_slices=2))
        await dataset_directory.announce_dataset(b, "digits", DatasetRecord(num_slices=2))
        providers = Providers(scheduler, "digits", None, a.peer_id)
        await providers.watch()
        assert providers.order(1) == (a.peer_id,)
