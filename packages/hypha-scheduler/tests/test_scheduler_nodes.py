"""Commands that ask nodes through the socket of a scheduler: ``hypha-scheduler nodes``, and logs of executors."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner, Result
from support.waiting import until

from hypha_net import pubsub, rpc
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.dataset_listing import LIST_DATASETS, DatasetPage, ListDatasets, ListedDataset
from hypha_proto.ids import PeerId, describe_peer
from hypha_proto.job_logs import LIST_LOGS, READ_LOG, ListLogs, LogEntry, LogPart, LogsListed, ReadLog
from hypha_proto.leases import Rejection
from hypha_proto.offers import WORKER_REQUESTS
from hypha_proto.record_file import EVENTS, RecordReader
from hypha_proto.resources import Resources
from hypha_proto.worker_status import DESCRIBE_WORKER, DescribeWorker, OfferedExecutor, WorkerStatus
from hypha_scheduler.cli import main
from hypha_scheduler.client import AsyncClient, Client, JobCommandError, LogLine
from hypha_scheduler.submission.client import socket_path
from hypha_scheduler.submission.log_client import MAX_BYTES, JobLogs, split_lines
from hypha_scheduler.submission.node_directory import NodeDirectory
from hypha_scheduler.submission.server import SubmissionServer

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
        tasks.start_soon(SubmissionServer(runs, never, never, nodes=directory).serve)
        await until(lambda: anyio.Path(socket_path(runs)).exists(), 60)
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


JOB = uuid.uuid4()


class Worker:
    """A worker that answers as `text` of each run says."""

    def __init__(self, endpoint: MemoryEndpoint, **texts: str) -> None:
        self.endpoint = endpoint
        self.texts = texts
        self.asked: list[PeerId] = []
        rpc.serve(endpoint, LIST_LOGS, self.list_logs)
        rpc.serve(endpoint, READ_LOG, self.read_log)

    async def list_logs(self, peer: PeerId, request: ListLogs) -> LogsListed:
        self.asked.append(peer)
        assert request.job_id == JOB
        return LogsListed(tuple(LogEntry(run, 0, len(text), True) for run, text in self.texts.items()))

    async def read_log(self, _peer: PeerId, request: ReadLog) -> LogPart:
        part = self.texts[request.run][request.position :][: request.limit]
        return LogPart(known=True, text=part, start=request.position, next=request.position + len(part))


class Lab:
    """A scheduler's socket, and workers of one job that has ended."""

    def __init__(self, network: MemoryNetwork, runs: Path, scheduler: PeerId) -> None:
        self.network, self.runs, self.scheduler = network, runs, scheduler
        self.events = runs / str(JOB) / EVENTS

    def note_workers(self, *workers: tuple[MemoryEndpoint, str | None]) -> None:
        """Write the job's events."""
        listed = [
            {"peer": str(endpoint.peer_id), "role": "train", "price": 1.0} | ({"name": name} if name else {})
            for endpoint, name in workers
        ]
        events: list[dict[str, Any]] = [
            {"event": "accepted", "time": 1.0, "job_id": str(JOB), "name": "digits"},
            {"event": "placement", "time": 2.0, "seconds": 1.0, "workers": listed},
            {"event": "finished", "time": 3.0},
        ]
        self.events.parent.mkdir(parents=True)
        self.events.write_text("".join(json.dumps(event) + "\n" for event in events))

    async def logs(self, *words: str) -> Result:
        command = ["logs", *words, "--socket", str(socket_path(self.runs))]
        return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(main, command))

    def reader(self) -> JobLogs:
        logs = JobLogs(socket_path(self.runs), str(JOB), RecordReader(self.events))
        logs.find_workers()
        return logs


@asynccontextmanager
async def open_lab(runs: Path) -> AsyncIterator[Lab]:
    network = MemoryNetwork(seed=1)
    async with network.endpoint("scheduler") as endpoint, anyio.create_task_group() as tasks:
        server = SubmissionServer(runs, never, never, nodes=NodeDirectory(endpoint))
        tasks.start_soon(server.serve)
        await until(lambda: anyio.Path(socket_path(runs)).exists(), 60)
        yield Lab(network, runs, endpoint.peer_id)
        tasks.cancel_scope.cancel()


async def test_lines_of_all_workers_are_shown_and_escaped(runs: Path) -> None:
    async with open_lab(runs) as lab, lab.network.endpoint("one") as one, lab.network.endpoint("two") as two:
        first = Worker(one, a="step 1\nstep 2\n", b="\x1b]0;title\x07done\r\n")
        Worker(two, c="begin\nend\n")
        lab.note_workers((one, "gpu-1"), (two, None))
        named, short = describe_peer(one.peer_id, "gpu-1"), describe_peer(two.peer_id)
        done = await lab.logs("digits")
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines() == [
            f"{named}: step 1",
            f"{named}: step 2",
            rf"{named}: \x1b]0;title\x07done",
            f"{short}: begin",
            f"{short}: end",
        ]
        assert set(first.asked) == {lab.scheduler}
        assert (await lab.logs("digits", "--tail", "1")).stdout.splitlines() == [
            rf"{named}: \x1b]0;title\x07done",
            f"{short}: end",
        ]
        chosen = await lab.logs(str(JOB)[:8], "--worker", short, "--format", "json", "--follow")
        assert [json.loads(line) for line in chosen.stdout.splitlines()] == [
            {"worker": short, "peer": str(two.peer_id), "run": "c", "line": line} for line in ("begin", "end")
        ]


async def test_a_worker_that_cannot_be_asked_is_named_and_others_are_shown(runs: Path) -> None:
    async with open_lab(runs) as lab, lab.network.endpoint("one") as one, lab.network.endpoint("old") as old:
        async with lab.network.endpoint("gone") as gone:
            Worker(one, a="step 1\n")
            lab.note_workers((one, "gpu-1"), (old, "older"), (gone, "away"))
        done = await lab.logs("digits")
        assert (done.exit_code, done.stdout) == (0, f"{describe_peer(one.peer_id, 'gpu-1')}: step 1\n")
        older, away = describe_peer(old.peer_id, "older"), describe_peer(gone.peer_id, "away")
        assert f"worker {older}: it gives no logs to schedulers: its owner updates hypha-worker" in done.stderr
        assert f"worker {away}: " in done.stderr
        assert (await lab.logs("digits", "--worker", "older")).exit_code == 1
        unknown = await lab.logs("digits", "--worker", "gpu-7")
        assert unknown.exit_code == 2
        assert "'gpu-7' is no worker of the job; its workers: gpu-1…" in unknown.stderr
        assert (await lab.logs("letters")).exit_code == 2


async def test_the_python_api_returns_lines_and_which_workers_gave_none(runs: Path) -> None:
    async with open_lab(runs) as lab, lab.network.endpoint("one") as one, lab.network.endpoint("old") as old:
        Worker(one, a="step 1\nstep\x1b 2\n")
        lab.note_workers((one, "gpu-1"), (old, "older"))
        client = AsyncClient(socket_path(lab.runs))
        printed = await client.logs("digits")
        peer, shown = str(one.peer_id), describe_peer(one.peer_id, "gpu-1")
        last = LogLine(shown, peer, "a", r"step\x1b 2")
        assert printed.lines == (LogLine(shown, peer, "a", "step 1"), last)
        assert list(printed.failures) == [describe_peer(old.peer_id, "older")]
        blocking = Client(client.socket)
        chosen = await anyio.to_thread.run_sync(lambda: blocking.logs(str(JOB)[:8], worker="gpu-1", tail=1))
        assert (chosen.lines, chosen.failures) == ((last,), {})
        with pytest.raises(ValueError, match="tail: -1 is negative"):
            await client.logs("digits", tail=-1)
        with pytest.raises(JobCommandError):
            await client.logs("letters")


async def test_only_what_is_new_is_read_and_no_more_than_the_bound(runs: Path) -> None:
    async with open_lab(runs) as lab, lab.network.endpoint("one") as one:
        worker = Worker(one, a="x" * 99 + "\n")
        worker.texts["a"] *= (MAX_BYTES // 100) + 1000
        lab.note_workers((one, "gpu-1"))
        logs = lab.reader()
        read = await anyio.to_thread.run_sync(lambda: list(logs.read()))
        assert 0.9 * MAX_BYTES < sum(len(line.text) for line in read) <= MAX_BYTES
        assert await anyio.to_thread.run_sync(lambda: list(logs.read())) == []
        worker.texts |= {"a": worker.texts["a"] + "more\n", "b": "another run\n"}
        new = await anyio.to_thread.run_sync(lambda: list(logs.read()))
        assert [(line.run, line.text) for line in new] == [("a", "more"), ("b", "another run")]


@pytest.mark.parametrize("advance", [0, 1], ids=["stays", "never ends"])
async def test_a_worker_that_answers_without_end_is_left(runs: Path, advance: int) -> None:
    async with open_lab(runs) as lab, lab.network.endpoint("one") as one:
        reads = 0

        class Endless(Worker):
            async def list_logs(self, _peer: PeerId, _request: ListLogs) -> LogsListed:
                return LogsListed((LogEntry("a", 0, 2**60, False),))

            async def read_log(self, _peer: PeerId, request: ReadLog) -> LogPart:
                nonlocal reads
                reads += 1
                return LogPart(known=True, text="", start=0, next=request.position + advance)

        Endless(one)
        lab.note_workers((one, "gpu-1"))
        assert (await lab.logs("digits")).exit_code == 0
        assert reads == (64 if advance else 1)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a\n\nb", ["a", "", "b"]),
        ("10%\r20%\r\nend\n", ["10%", "20%", "end"]),
        ("tab\tstays \x9b31m\u202e", ["tab\tstays \\x9b31m\\x202e"]),
    ],
)
def test_lines_end_as_executors_end_them(text: str, lines: list[str]) -> None:
    assert split_lines(text) == lines
