"""Pulling files from peers: a data node that restarts, and one that refuses."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from hypha_net import transfer
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_proto.transfer import PullRequest, Refusal
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import BridgeError
from hypha_worker.job_storage import JobStorage


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_restarting_data_node_is_retried_and_a_refusal_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setattr("hypha_worker.connectors.peer_files.UNAVAILABLE_DELAYS", (0.2,) * 50)
    (tmp_path / "slice").write_bytes(b"x" * 1000)

    async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(tmp_path / "slice") if comes_back else Refusal(reason="not here any more")

    async def main() -> None:
        network = MemoryNetwork()
        async with network.endpoint("worker") as worker, network.endpoint("data") as data:
            files, address = PeerFiles(worker, JobStorage(tmp_path, 1 << 20)), SliceAddress(dataset="digits", index=0)
            async with anyio.create_task_group() as tasks:

                async def serve() -> None:
                    await anyio.sleep(0.5)  # the node is reachable, and does not serve files yet
                    transfer.serve_pulls(data, resolve)

                tasks.start_soon(serve)
                if comes_back:
                    _, peer = await files.pull([data.peer_id], address, tmp_path / "got")
                    assert peer == data.peer_id
                    assert (tmp_path / "got").read_bytes() == b"x" * 1000
                else:
                    with pytest.raises(BridgeError, match="not here any more"):
                        await files.pull([data.peer_id], address, tmp_path / "got")

    anyio.run(main, backend="trio")
