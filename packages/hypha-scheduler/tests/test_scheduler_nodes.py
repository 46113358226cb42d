"""``hypha-scheduler nodes``: workers and datasets that a scheduler knows, through its socket."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import anyio.to_thread
from click.testing import CliRunner, Result

from hypha_net import pubsub, rpc
from hypha_net.testing import MemoryNetwork
from hypha_proto.dataset_listing import LIST_DATASETS, DatasetPage, ListDatasets, ListedDataset
from hypha_proto.ids import PeerId, describe_peer
from hypha_proto.leases import Rejection
from hypha_proto.offers import WORKER_REQUESTS
from hypha_proto.resources import Resources
from hypha_proto.worker_status import DESCRIBE_WORKER, DescribeWorker, OfferedExecutor, WorkerStatus
from hypha_scheduler.cli import main
from hypha_scheduler.submission.node_directory import NodeDirectory
from hypha_scheduler.submission.server import SubmissionServer, socket_path

STATUS = WorkerStatus(
    total=Resources(cpu=8.0, memory=32.0),
    free=Resources(cpu=6.0),
    price=50.0,
    executors=(OfferedExecutor("train", "diloco", "process"), OfferedExecutor("train", "\x1b[2J", "other")),
    tasks=2,
    rejections=(Rejection(code="paused", text="its owner has paused it"),),
)


async def describe(_peer: PeerId, _request: DescribeWorker) -> WorkerStatus:
    return STATUS


async def list_digits(_peer: PeerId, _request: ListDatasets) -> DatasetPage:
    return DatasetPage(datasets=(ListedDataset(name="digits", num_slices=8, providers=2, manifests=2),))


async def never(*_: object) -> Path:
    raise AssertionError("no job runs")


async def test_workers_and_datasets_are_listed_and_a_wrong_name_has_the_nearest(runs: Path) -> None:
    async def nodes(*words: str) -> Result:
        command = ["nodes", *words, "--socket", str(socket_path(runs))]
        return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, command))

    network, now = MemoryNetwork(seed=1), 1000.0
    async with (
        network.endpoint("scheduler") as endpoint,
        network.endpoint("gateway") as gateway,
        anyio.create_task_group() as tasks,
    ):
        rpc.serve(gateway, LIST_DATASETS, list_digits)
        endpoint.gateway_peers = {"/memory/gateway": gateway.peer_id}
        directory = NodeDirectory(endpoint, lambda: now)
        tasks.start_soon(directory.watch)
        tasks.start_soon(SubmissionServer(runs, never, list_nodes=directory.describe).serve)
        while not await anyio.Path(socket_path(runs)).exists():
            await anyio.sleep(0.01)
        async with network.endpoint("one") as one, pubsub.subscribe(one, WORKER_REQUESTS):
            await endpoint.connect(one.addresses[0])
            rpc.serve(one, DESCRIBE_WORKER, describe)
            shown = describe_peer(one.peer_id)
            lines = (await nodes()).stdout.splitlines()
            assert lines[0] == "workers:"
            assert lines[1].startswith(f"  {shown}  seen ")
            assert lines[1].endswith(", price 50/h, running tasks: 2")
            assert lines[2:] == [
                "    free: cpu 6 of 8 cores, memory 0 of 32 GB",
                r"    executors: train/diloco (process), train/\x1b[2J (other)",
                "    no offers: its owner has paused it",
                "datasets:",
                "  digits  8 slices, data nodes: 2, 2 different manifests",
            ]
            [entry] = map(json.loads, (await nodes(str(one.peer_id), "--format", "json")).stdout.splitlines())
            assert (entry["worker"]["seen"], entry["worker"]["free"]["cpu"]) == (1000.0, 6.0)
            assert (await nodes("digits")).stdout.splitlines()[0] == "datasets:"
            wrong = await nodes("digit")
            assert (wrong.exit_code, wrong.stdout) == (2, "")
            assert "no worker or dataset is called 'digit'; the nearest is 'digits'" in wrong.stderr
        await anyio.wait_all_tasks_blocked()  # that it has left is noted
        now = 2000.0
        [gone, _] = map(json.loads, (await nodes("--format", "json")).stdout.splitlines())
        assert gone["worker"]["peer"] == str(one.peer_id)
        assert gone["worker"]["seen"] == 1000.0
        assert "no answer: " in gone["worker"]["reasons"][0]
        tasks.cancel_scope.cancel()
