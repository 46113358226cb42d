"""Jobs that exceed what their lease has, or leave processes behind, on the layers that this machine has."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from hypha_net.testing import MemoryNetwork
from hypha_worker.cli import main as command
from hypha_worker.errors import IsolationError
from hypha_worker.service import open_worker

InLab = Callable[..., Any]
LAYERS = ["cgroup", "bubblewrap", "own-uid", "landlock", "supervisor", "rlimits"]
FORK_BOMB = """
post("/status/send", {"status": {"batch_size": 1}})
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.05)
"""
WITHOUT_SANDBOX = {"disable": ["bubblewrap", "own-uid"]}


@pytest.mark.usefixtures("cgroups")
@pytest.mark.parametrize("isolation", [{}, WITHOUT_SANDBOX], ids=["sandbox", "without"])
async def test_twice_the_memory_of_a_lease_ends_the_job_and_is_named(in_lab: InLab, isolation: dict[str, Any]) -> None:
    async with in_lab(isolation=isolation) as lab:
        lab.write_script("x = bytearray(400_000_000); time.sleep(60)")
        lease = await lab.scheduler.hire(cpu=1.0, memory=0.2)
        await lab.scheduler.dispatch(lease, lab.train_spec())
        end = await lab.scheduler.ended()
        assert end.outcome == "failed"
        assert "used more memory than the 0.2 GB of its lease (memory): request more" in end.reason


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("cgroups")
@pytest.mark.parametrize("isolation", [{}, WITHOUT_SANDBOX], ids=["sandbox", "without"])
async def test_a_fork_bomb_ends_with_its_job(in_lab: InLab, isolation: dict[str, Any]) -> None:
    async with in_lab(isolation=isolation) as lab:
        script = str(lab.folder / "script.py")

        def bombs() -> list[int]:
            listed = psutil.process_iter(["cmdline"])
            return [each.pid for each in listed if script in (each.info["cmdline"] or [])]

        lease = await lab.start(FORK_BOMB)
        await lab.scheduler.until(lambda: len(bombs()) > 20)
        await lab.scheduler.release(lab.peer, lease)
        end = await lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert bombs() == []
        assert lab.left_behind() == []
        assert lab.worker.lease_manager.leases == ()


async def test_jobs_run_without_any_layer(in_lab: InLab, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with in_lab(isolation={"disable": LAYERS}) as lab:
            await lab.start("print(1)")
            assert (await lab.scheduler.ended()).outcome == "finished"
    assert "jobs are isolated by nothing only, not by bubblewrap: disabled" in caplog.text


async def test_a_worker_without_a_required_layer_does_not_start(tmp_path: Path, make_config: Any) -> None:
    isolation = {"require": ["rlimits", "no-such"], "disable": ["rlimits"]}
    with pytest.raises(ValueError, match="isolation"):
        make_config(tmp_path, isolation=isolation)
    config = make_config(tmp_path, isolation={"require": ["landlock", "bubblewrap"]})  # one replaces the other
    async with MemoryNetwork().endpoint("worker") as endpoint:
        with pytest.raises(IsolationError, match=r"the layer (landlock|bubblewrap) does not work here: \w"):
            async with open_worker(config, endpoint):
                raise AssertionError("it started")


def test_probe_without_an_address_tells_the_owner_in_five_lines() -> None:
    done = CliRunner().invoke(command, ["probe"])
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "files",
        "processes",
        "network",
        "resources",
        "user",
    ]
    value = json.loads(CliRunner().invoke(command, ["probe", "--format", "json"]).stdout)
    assert set(value["layers"]) == set(LAYERS)
