"""The owner of a real worker: status, pause over a restart, accounts after a kill, and a drain during a job."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.task_network import TaskNetwork, task_network
from support.waiting import wait_until

from hypha_local.processes import script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(300)]

WORKER = "worker-1"
LOSS = 10.0
"""Most seconds of a lease that a killed worker loses."""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskNetwork]:
    root: Path = tmp_path_factory.mktemp("owner")  # the path of a test's own folder is too long for a socket in it
    with task_network(root / "run", workers=1) as running:
        yield running


def start_command(network: TaskNetwork, name: str, *options: str) -> subprocess.Popen[str]:
    words = [script("hypha-worker"), name, "--config", str(network.configuration(WORKER)), *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_command(network: TaskNetwork, name: str, *options: str) -> str:
    process = start_command(network, name, *options)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def status(network: TaskNetwork) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_command(network, "status", "--format", "json"))
    return found


def accounts(network: TaskNetwork) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run_command(network, "accounts", "--format", "json", "--since", "1d"))
    return found


def accounts_of_scheduler(network: TaskNetwork) -> list[dict[str, Any]]:
    config = str(network.configuration("scheduler"))
    command = [script("hypha-scheduler"), "accounts", "--config", config, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout))


def test_owner_follows_pauses_drains_and_accounts_a_worker(network: TaskNetwork) -> None:
    wait_until(lambda: any(network.folders.root.rglob("worker.sock")), 60, "the control socket")
    found = status(network)
    assert (found["state"], found["ready"], found["jobs"]) == ("running", True, [])
    assert [gateway["peer"] for gateway in found["gateways"]] == [network.peer_id("gateway")]

    assert run_command(network, "pause").startswith("paused: ")
    assert network.stop_child(network.processes.child(WORKER)) == 0
    network.start(WORKER)
    network.wait_healthy(WORKER)
    go = network.written / "go"
    code = f"import time, pathlib\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)"
    job = network.submit({"type": "tasks", "tasks": [{"name": "t", "driver": {"shell/python": {"code": code}}}]})
    wait_until(lambda: "its owner has paused" in str(status(network)["requests"]), 60, "a refused request")
    assert (status(network)["state"], status(network)["jobs"]) == ("paused", [])
    assert run_command(network, "resume") == "resumed\n"

    wait_until(lambda: status(network)["jobs"], 60, "the job")
    [running] = status(network)["jobs"]
    assert (running["job"], running["task"], running["executor"]) == (job.job_id, "t", "shell/python")
    wait_until(lambda: [row["job"] for row in accounts(network)] == [job.job_id], 60, "an account")
    [held] = [lease for lease in status(network)["leases"] if lease["lease"] == running["lease"]]
    network.kill(WORKER)
    [row] = accounts(network)
    assert (row["lease"], row["scheduler"]) == (running["lease"], running["scheduler"])
    assert row["seconds"] >= held["seconds"] - LOSS

    network.start(WORKER)
    network.wait_healthy(WORKER)
    assert [row["outcome"] for row in accounts(network) if row["lease"] == running["lease"]] == ["interrupted"]
    wait_until(lambda: status(network)["jobs"], 60, "the job after the restart")
    began = time.monotonic()
    drain = start_command(network, "drain", "--deadline", "100")
    assert drain.stdout is not None
    assert json.loads(drain.stdout.readline())["draining"]
    go.touch()
    output, errors = drain.communicate(timeout=100)
    assert (drain.returncode, json.loads(output)) == (0, {"drained": True, "cancelled": []}), errors
    assert network.processes.child(WORKER).process.wait(60) == 0
    job.wait(60)
    rows = accounts(network)
    assert [row["outcome"] for row in rows if row["job"] == job.job_id] == ["interrupted", "finished"]
    assert 0 < rows[-1]["seconds"] < time.monotonic() - began + 100
    per_second = rows[-1]["price"] / 3600  # seconds are written to the millisecond
    assert rows[-1]["tokens"] == pytest.approx(rows[-1]["seconds"] * per_second, abs=0.001 * per_second + 1e-6)
    paid = {entry["lease"]: entry for entry in accounts_of_scheduler(network)}
    for entry, within in zip(rows[-2:], (LOSS, 1.0), strict=True):  # the first lease ended with the killed worker
        assert entry["seconds"] == pytest.approx(paid[entry["lease"]]["seconds"], rel=0.01, abs=within)
    assert "Traceback" not in network.log(WORKER), network.log(WORKER)
