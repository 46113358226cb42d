"""An executor that fails several times in a row at its start is not offered until it is brought back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_net.testing import MemoryNetwork
from hypha_proto.leases import Rejection
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.worker_status import OfferedExecutor
from hypha_worker.executor_health import EXCLUSION, MAX_FAILURES, ExecutorHealth
from hypha_worker.service import open_worker

USES_BRIDGE_AND_FAILS = "post('/status/send', {'status': {'batch_size': 8}})\nsys.exit(3)\n"


def test_failures_in_a_row_take_an_executor_out_for_a_time(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    health = ExecutorHealth(OfferedExecutor("train", "x", "process"), clock=lambda: now)
    for _ in range(MAX_FAILURES - 1):
        health.note_failure("no module")
    health.note_success()
    for _ in range(MAX_FAILURES - 1):
        health.note_failure("no module")
    assert health.exclusion is None
    assert not caplog.records
    health.note_failure("no module")
    assert health.exclusion == "it failed 3 times in a row at its start: no module"
    assert "executor train/x is taken out of bids for 10 minutes: it failed 3 times in a row" in caplog.text
    now = EXCLUSION
    assert health.exclusion is None
    health.note_failure("no module")
    assert health.exclusion == "it failed 4 times in a row at its start: no module"
    now += 1
    health.reset()
    assert health.exclusion is None


async def fail(lab: Any, count: int, script: str) -> None:
    for _ in range(count):
        lease = await lab.start(script)
        assert (await lab.scheduler.ended()).outcome == "failed"
        assert await lab.scheduler.release(lab.peer, lease)


async def test_executor_that_fails_at_its_start_is_out_of_bids_until_the_owner_resumes(on_site: Any) -> None:
    async with on_site() as site:
        peer = site.lab.peer
        await fail(site.lab, MAX_FAILURES, "sys.exit('no module')\n")
        text = "executor train/script is out of bids, because it fails at its start"
        assert await site.lab.scheduler.why_not(peer) == (Rejection(code="executor", text=text),)
        [excluded] = json.loads((await site.command("status", "--format", "json")).stdout)["excluded"]
        assert excluded["executor"] == "train/script"
        assert excluded["reason"].startswith("it failed 3 times in a row at its start: executor ")
        assert "not offered  train/script: it failed 3 times" in (await site.command("status")).stdout
        assert (await site.command("resume")).exit_code == 0
        assert await site.lab.scheduler.why_not(peer) == ()


async def test_executor_whose_memory_is_exhausted_at_its_start_stays_in_bids(in_lab: Any) -> None:
    async with in_lab() as lab:
        await fail(lab, MAX_FAILURES, "sys.exit(75)\n")
        assert await lab.scheduler.why_not(lab.peer) == ()


async def test_job_that_fails_after_its_executor_has_started_does_not_count(in_lab: Any) -> None:
    async with in_lab() as lab:
        await fail(lab, MAX_FAILURES - 1, "sys.exit(3)\n")
        await fail(lab, 1, USES_BRIDGE_AND_FAILS)
        await fail(lab, 1, "sys.exit(3)\n")
        assert await lab.scheduler.why_not(lab.peer) == ()


async def test_executor_whose_check_fails_is_not_offered_until_the_owner_has_mended_it(
    on_site: Any, tmp_path: Path
) -> None:
    wanted = tmp_path / "installed"
    executor = {"class": "train", "name": "script", "cmd": sys.executable, "check": ["ls", str(wanted)]}
    server = {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"}
    async with on_site(executors=[executor, server]) as site:
        peer = site.lab.peer
        [rejection] = await site.lab.scheduler.why_not(peer)
        assert rejection.code == "executor"
        [excluded] = json.loads((await site.command("status", "--format", "json")).stdout)["excluded"]
        assert excluded["reason"].startswith(f"its check (ls {wanted}) failed: ")
        assert "No such file" in excluded["reason"]
        wanted.touch()
        assert (await site.command("resume")).exit_code == 0
        assert await site.lab.scheduler.why_not(peer) == ()
    assert [path.name for path in (tmp_path / "work").glob("hypha-check-*")] == []


@pytest.mark.parametrize("cmd", ["no-such-program", "/no/such/program", "{plain}"])
async def test_worker_that_can_offer_no_executor_is_not_ready(cmd: str, tmp_path: Path, make_config: Any) -> None:
    plain = tmp_path / "plain.txt"
    plain.touch()
    cmd = cmd.format(plain=plain)
    faults = {
        "no-such-program": "is not found: install it, or write its absolute path in cmd",
        "/no/such/program": "is not found: install it, or correct its path in cmd",
        str(plain): f"cannot be run by this worker's user: let uid {os.getuid()} execute it",
    }
    executor = {"class": "train", "name": "script", "cmd": cmd}
    async with (
        MemoryNetwork().endpoint("worker") as endpoint,
        open_worker(make_config(tmp_path, executors=[executor]), endpoint) as worker,
    ):
        assert worker.fault == f"no executor can be offered: train/script: its command {cmd!r} {faults[cmd]}"


@pytest.mark.parametrize("is_out", [True, False])
async def test_of_a_task_only_a_process_that_cannot_be_started_counts(
    is_out: bool, in_task_lab: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.symlink_to("/bin/false")
    executor = {"class": "shell", "name": "python", "runtime": "process", "cmd": str(program)}
    async with in_task_lab(executors=[executor]) as (lab, tasks, lease):
        if is_out:
            program.unlink()  # it was there when the worker checked it
        for number in range(MAX_FAILURES):
            tasks.start(lease, f"t{number}", "", executor="shell/python")
            await tasks.until(lambda number=number: "failed" in tasks.kinds(f"t{number}"))
        rejections = await lab.scheduler.why_not(lab.peer, ExecutorDescriptor.parse("shell/python"))
        assert any("executor shell/python is out of bids" in each.text for each in rejections) == is_out
