"""Jobs that wait, are cancelled and followed from several terminals, on a network of real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.process_ready import accept_interrupts
from support.task_network import TaskNetwork, task_network
from support.waiting import wait_until

from hypha_local.processes import script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]

SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"
LONG = {"name": "sleeps", "driver": {"shell/python": {"code": SLEEP}}}
SHORT = {"name": "passes", "driver": {"shell/pass": {}}}
PRINTED = re.compile(r"^worker-1…\w{6}: asleep$", re.MULTILINE)


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskNetwork]:
    with task_network(tmp_path_factory.mktemp("network") / "run", workers=1) as running:
        yield running


class Commands:
    """Commands of the owner of jobs, each in a process of its own."""

    def __init__(self, network: TaskNetwork) -> None:
        self.network = network
        self.socket = str(network.folders.runs / "scheduler.sock")

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [script("hypha-scheduler"), *words, "--socket", self.socket]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
            preexec_fn=accept_interrupts,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end; return what it prints."""
        process = self.start(*words)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code, output + errors
        return output + errors

    def jobs(self, *words: str) -> dict[str, dict[str, Any]]:
        lines = self.run("jobs", "--format", "json", *words).splitlines()
        return {entry["name"]: entry for entry in map(json.loads, lines)}

    def file(self, name: str, task: dict[str, Any]) -> str:
        path = self.network.folders.root / f"{name}.json"
        path.write_text(json.dumps({"type": "tasks", "name": name, "tasks": [task], "workers": 1}))
        return str(path)


@pytest.mark.gate
def test_three_jobs_of_which_two_are_cancelled(network: TaskNetwork) -> None:
    commands = Commands(network)
    submit = commands.start("submit", commands.file("one", LONG))
    wait_until(network.executors, 60, "the executor of the first job")
    commands.run("submit", commands.file("two", LONG), "--detach")
    commands.run("submit", commands.file("three", SHORT), "--detach")
    wait_until(  # they seek a worker first, and count as running meanwhile
        lambda: (
            {name for name, job in commands.jobs().items() if "0 of 1 held" in job.get("reason", "")}
            == {"two", "three"}
        ),
        60,
        "the reasons for which they wait",
    )
    assert {name: entry["state"] for name, entry in commands.jobs().items()} == {
        "one": "running",
        "two": "waiting",
        "three": "waiting",
    }
    assert "no job has a name" in commands.run("status", "nothing", code=2)
    wait_until(lambda: PRINTED.search(commands.run("logs", "on")) is not None, 60, "the line of its executor")
    assert re.search(r"  worker-1…\w{6}  seen now, .*, running tasks: 1\n    free: ", commands.run("nodes"))
    assert "the nearest is 'worker-1'" in commands.run("nodes", "woker-1", code=2)
    terminals = [commands.start("attach", "one") for _ in range(2)]
    third = commands.start("attach", "three", "--format", "json")

    assert submit.stdout is not None
    job_id = json.loads(submit.stdout.readline())["job_id"]
    submit.send_signal(signal.SIGINT)
    _, errors = submit.communicate(timeout=60)
    assert submit.returncode == 130, errors
    assert f"job {job_id} goes on" in errors
    assert re.search(rf"hypha-scheduler attach {job_id} .*\n.*hypha-scheduler cancel {job_id} ", errors)
    assert commands.jobs()["one"]["state"] == "running"

    running = {process.pid for process in network.executors()}
    commands.run("cancel", "tw")
    assert {process.pid for process in network.executors()} == running  # the first goes on
    commands.run("cancel", job_id[:8])
    wait_until(lambda: running.isdisjoint(process.pid for process in network.executors()), 60, "its executor's end")
    for terminal in terminals:
        output, errors = terminal.communicate(timeout=60)
        assert terminal.returncode == 1, output + errors
        assert re.search(r"worker-1…\w{6} \(", errors)  # the name in its certificate
        assert "cancelled: its owner cancelled it" in errors
    output, errors = third.communicate(timeout=60)
    assert third.returncode == 0, output + errors
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["event"] for event in events if event.get("event") in ("queued", "accepted", "finished")] == [
        "queued",
        "accepted",
        "finished",
    ]
    states = {name: entry["state"] for name, entry in commands.jobs("--all").items()}
    assert states == {"one": "cancelled", "two": "cancelled", "three": "finished"}
    assert "has ended: cancelled" in commands.run("cancel", "one", code=1)
    assert PRINTED.search(commands.run("logs", "one", "--tail", "100")), "its worker keeps the log"
    wait_until(lambda: not network.executors(), 60, "the end of all executors")
    assert Path(commands.jobs("--all")["three"]["directory"], "result.json").exists()


def test_the_documented_program_submits_and_follows_a_job(network: TaskNetwork) -> None:
    page = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text()
    [program] = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    [schema] = re.findall(r"```json\n(.+?)```", page, re.DOTALL)
    assert json.loads(schema)["properties"]["job"]
    root = network.folders.root
    (root / "job.toml").write_text(
        'type = "tasks"\nname = "documented"\n[[tasks]]\nname = "passes"\ndriver = { "shell/pass" = {} }\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr  # such a job has no rounds
    assert Commands(network).jobs("--all")["documented"]["state"] == "finished"
