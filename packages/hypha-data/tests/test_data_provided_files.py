"""Single files that a data node provides by their SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hypha_data.config import DataConfig
from hypha_data.errors import DatasetError
from hypha_data.provided_files import read_file
from hypha_data.service import serve
from hypha_net import transfer
from hypha_net.content_directory import content_request, find_holders
from hypha_net.errors import TransferRefusedError
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.transfer import PullRequest

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@asynccontextmanager
async def running(*files: Path) -> AsyncIterator[tuple[Node, MemoryEndpoint]]:
    pem = files[0].parent / "no.pem"
    config = DataConfig(
        cert_pem=pem, key_pem=pem, trust_pem=pem, gateway_addresses=["/ip4/192.0.2.1/tcp/4001"], provide=list(files)
    )
    network = MemoryNetwork()
    async with (
        network.endpoint("data") as endpoint,
        network.endpoint("worker") as worker,
        anyio.create_task_group() as tasks,
    ):
        node = Node(endpoint, tasks)
        tasks.start_soon(serve, config, node)
        while not node.readiness.is_ready:
            await anyio.sleep(0.01)
        yield node, worker
        tasks.cancel_scope.cancel()


async def test_a_file_is_announced_and_pulled_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(CONTENT)
    (tmp_path / "again").write_bytes(CONTENT)
    async with running(tmp_path / "model", tmp_path / "again") as (node, worker):
        [holder] = await find_holders(worker, SHA256)
        assert (holder.peer, holder.size) == (node.endpoint.peer_id, len(CONTENT))
        target, digest = tmp_path / "pulled", f"sha256:{SHA256}"
        pulled = await transfer.pull(worker, holder.peer, content_request(SHA256), target, digest=digest)
        assert pulled == transfer.PullResult(len(CONTENT), digest)
        for wrong in (
            content_request("0" * 64),
            PullRequest(dataset=f"sha256:{SHA256}", index=1),
            PullRequest(dataset=f"sha256:{SHA256}", index=0, name="manifest"),
        ):
            with pytest.raises(TransferRefusedError, match="no content"):
                await transfer.pull(worker, holder.peer, wrong, target)
    assert (tmp_path / "pulled").read_bytes() == CONTENT


async def test_a_file_that_has_changed_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(CONTENT)
    async with running(tmp_path / "model") as (node, worker):
        os.truncate(tmp_path / "model", 10)
        with pytest.raises(TransferRefusedError, match="has changed here"):
            await transfer.pull(worker, node.endpoint.peer_id, content_request(SHA256), tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("name", ["none", "folder", "pipe"])
def test_what_is_no_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatasetError, match=name):
        read_file(tmp_path / name, lambda _count: None)
