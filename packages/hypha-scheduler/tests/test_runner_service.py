"""Configured and submitted jobs in one scheduler: when it ends, and what happens if it cannot take jobs."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest
from support.scripted_jobs import Lab, OpenJobs, QuietOperator, ScriptedJob, ScriptedStrategy

from hypha_net.node.lifecycle import Node
from hypha_scheduler.config import AuctionTable, ConnectorsTable, QueueTable, SchedulerConfig
from hypha_scheduler.service import serve
from hypha_scheduler.strategies.base import EndJob
from hypha_scheduler.submission.server import socket_path

pytestmark = pytest.mark.virtual_clock


def config(runs: Path, jobs: int) -> Any:
    table = SimpleNamespace(
        auction=AuctionTable(), queue=QueueTable(), connectors=ConnectorsTable(), strategies=None, model_command=()
    )
    found = SimpleNamespace(bridge_address=None, scheduler=table, runs_dir=runs, jobs=(ScriptedJob(),) * jobs)
    assert set(vars(found)) - {"jobs", "bridge_address", "runs_dir"} <= set(SchedulerConfig.model_fields)
    return found


class Service:
    """A scheduler's `serve` in the background."""

    def __init__(self, lab: Lab, runs: Path, jobs: int) -> None:
        self.runs, self.ended = runs, anyio.Event()
        self.error: BaseException | None = None
        lab.tasks.start_soon(self._serve, lab, jobs)

    async def _serve(self, lab: Lab, jobs: int) -> None:
        try:
            await serve(config(self.runs, jobs), Node(lab.endpoint, lab.tasks))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.ended.set()

    async def submit(self) -> anyio.abc.ByteStream:
        """Submit a job; return the connection once the job is accepted."""
        while not await anyio.Path(socket_path(self.runs)).exists():
            await anyio.sleep(0.01)
        stream = await anyio.connect_unix(socket_path(self.runs))
        await stream.send(json.dumps({"job": {"type": "scripted"}}).encode())
        await stream.send_eof()
        assert json.loads(await stream.receive())["accepted"] is True
        return stream


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose path is short enough for a socket."""
    return tmp_path_factory.getbasetemp() / uuid.uuid4().hex[:8]


@pytest.fixture(autouse=True)
def _parse_scripted_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_scheduler.submission.server.parse_job", lambda _data, _allowed=None: ScriptedJob())


@pytest.mark.parametrize("last", ["configured", "submitted"])
async def test_scheduler_with_configured_jobs_ends_after_them_and_all_submitted_ones(
    open_jobs: OpenJobs, runs: Path, last: str
) -> None:
    strategy = ScriptedStrategy()
    async with open_jobs(strategy) as lab:
        service = Service(lab, runs, jobs=1)
        configured: QuietOperator = await strategy.operator()
        connection = await service.submit()
        submitted: QuietOperator = await strategy.operator(1)
        for operator in (configured, submitted):
            await operator.until("acquired")
        first, second = (submitted, configured) if last == "configured" else (configured, submitted)
        first.act(EndJob())
        while not (first.context.directory / "result.json").exists():
            await anyio.sleep(0.01)
        with anyio.move_on_after(60) as waited:
            await service.ended.wait()
        assert waited.cancelled_caught
        second.act(EndJob())
        await service.ended.wait()
        assert service.error is None
        assert "result" in json.loads(await connection.receive())
        assert not socket_path(runs).exists()


async def test_scheduler_without_configured_jobs_stays(open_jobs: OpenJobs, runs: Path) -> None:
    strategy = ScriptedStrategy()
    async with open_jobs(strategy) as lab:
        service = Service(lab, runs, jobs=0)
        for number in range(2):
            connection = await service.submit()
            operator: QuietOperator = await strategy.operator(number)
            operator.act(EndJob())
            assert "result" in json.loads(await connection.receive())
        with anyio.move_on_after(60) as waited:
            await service.ended.wait()
        assert waited.cancelled_caught


@pytest.mark.parametrize("jobs", [0, 1])
async def test_configured_jobs_run_although_no_jobs_can_be_submitted(
    open_jobs: OpenJobs, runs: Path, caplog: pytest.LogCaptureFixture, jobs: int
) -> None:
    """Another scheduler has the socket; without configured jobs that is an error."""
    strategy = ScriptedStrategy()
    with caplog.at_level(logging.WARNING):
        async with open_jobs(strategy) as lab:
            other = Service(lab, runs, jobs=0)
            await other.submit()
            (await strategy.operator()).act(EndJob())
            service = Service(lab, runs, jobs)
            if jobs:
                operator: QuietOperator = await strategy.operator(len(strategy.operators))
                operator.act(EndJob())
            await service.ended.wait()
            if jobs:
                assert service.error is None
                assert "no jobs can be submitted beside the configured ones" in caplog.text
            else:
                assert isinstance(service.error, ExceptionGroup)
                assert service.error.subgroup(OSError) is not None
            await other.submit()  # the other scheduler's socket is as it was
