"""A gateway lists the datasets that are announced to it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from hypha_gateway.config import GatewayConfig
from hypha_gateway.service import serve
from hypha_net.dataset_directory import announce_dataset, list_datasets
from hypha_net.errors import RequestError, UnsupportedProtocolError
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryNetwork
from hypha_proto.datasets import DatasetRecord

CONFIG = GatewayConfig(cert_pem=Path("c"), key_pem=Path("k"), trust_pem=Path("t"))
FIRST, SECOND = "blake3:" + "ab" * 32, "blake3:" + "cd" * 32


async def test_all_pages_are_listed_and_what_is_no_dataset_is_left_out() -> None:
    network = MemoryNetwork()
    with anyio.fail_after(60):
        async with (
            network.endpoint("gateway") as gateway,
            network.endpoint("data") as data,
            network.endpoint("other") as other,
            anyio.create_task_group() as tasks,
        ):
            for number in range(1001):
                await announce_dataset(data, f"d{number:04}", DatasetRecord(num_slices=number))
            await announce_dataset(data, "both", DatasetRecord(num_slices=1, seq=1, manifest=FIRST))
            await announce_dataset(other, "both", DatasetRecord(num_slices=2, seq=2, manifest=SECOND))
            for name in ("bell\x07", "x" * 256):
                await announce_dataset(data, name, DatasetRecord(num_slices=1))
            await data.put_record(b"hypha-content:sha256:00", b'{"size":1}')
            await data.put_record(b"\xff", b'{"num_slices":1}')
            node = Node(gateway, tasks)
            tasks.start_soon(serve, CONFIG, node)
            while not node.readiness.is_ready:
                await anyio.sleep(0.01)
            found = await list_datasets(other, gateway.peer_id, timeout=30)
            assert [each.name for each in found] == ["both", *(f"d{number:04}" for number in range(1001))]
            assert (found[0].num_slices, found[0].providers, found[0].manifests) == (2, 2, 2)
            assert (found[0].manifest, found[-1].num_slices, found[-1].manifest) == (SECOND, 1000, None)
            with pytest.raises(UnsupportedProtocolError):
                await list_datasets(gateway, other.peer_id)
            data.role = other.role = "worker"
            await gateway.disconnect(other.peer_id)
            with pytest.raises(RequestError):
                await list_datasets(other, gateway.peer_id)
            tasks.cancel_scope.cancel()
