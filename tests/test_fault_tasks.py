"""Faults during jobs of tasks on a real network: the job completes, and every task finishes exactly once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.task_network import Submission, TaskNetwork, task_network

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with task_network(root, workers=3) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: TaskNetwork) -> Iterator[None]:
    yield
    network.revive()
    network.check_quiet()


def chains(count: int, length: int, seconds: float = 0.0, ran: Path = Path(os.devnull)) -> dict[str, Any]:
    """Return a job of chains: each task adds its name to what the one before it has made, and to the file `ran`."""
    code = f"""
import pathlib, time
with open({str(ran)!r}, 'a') as ran:
    ran.write(task['task'] + chr(10))
time.sleep({seconds})
before = pathlib.Path(task['settings']['before']).read_text() if 'before' in task['settings'] else ''
pathlib.Path('names').write_text(before + task['task'] + ' ')
"""
    tasks = []
    for chain in range(count):
        for number in range(length):
            task: dict[str, Any] = {"name": f"c{chain}-{number}", "outputs": {"names": "names"}}
            settings = {"code": code}
            if number:
                source = {"task": f"c{chain}-{number - 1}", "output": "names"}
                task["resources"] = [{"name": "before", "result": source}]
                settings["before"] = "before"
            tasks.append(task | {"driver": {"shell/python": settings}})
    return {"type": "tasks", "tasks": tasks, "workers": 3}


def check(job: Submission, count: int, length: int) -> None:
    """Check that each chain's result names each of its tasks once, in order."""
    for chain in range(count):
        text = (job.directory / "results" / f"c{chain}-{length - 1}" / "names").read_text()
        assert text.split() == [f"c{chain}-{number}" for number in range(length)]


@pytest.mark.gate
@pytest.mark.processes
def test_a_killed_worker_costs_its_attempts_and_its_outputs_are_made_again(network: TaskNetwork) -> None:
    job = network.submit(chains(6, 5, 0.1))
    job.wait_for_finished(8)
    network.kill("worker-1")
    summary = job.wait(120)
    check(job, 6, 5)
    assert summary["job_id"] == job.job_id


@pytest.mark.parametrize("is_restarted", [False, True], ids=["by the command", "by the scheduler"])
def test_a_job_whose_scheduler_was_killed_is_resumed(network: TaskNetwork, is_restarted: bool) -> None:
    """Finished tasks do not run again: their outputs are still at the workers."""
    ran = network.written / f"ran-{is_restarted}"
    job = network.submit(chains(6, 5, 0.4, ran))
    job.wait_for_finished(8)
    network.kill("scheduler")
    assert job.process.wait(60) == 3
    finished = job.finished()
    if is_restarted:
        network.revive()
    network.resume(job).wait(120)
    check(job, 6, 5)
    assert len(finished) < 30
    runs = Counter(ran.read_text().split())
    assert {name: runs[name] for name in finished} == dict.fromkeys(finished, 1)
    assert Counter(job.finished()) == dict.fromkeys(runs, 1)
    assert len(runs) == 30
    assert [len(job.records(kind)) for kind in ("accepted", "resumed")] == [1, 1]


@pytest.mark.timeout(600)
def test_a_graph_of_1000_tasks_with_a_killed_worker_finishes_each_exactly_once(network: TaskNetwork) -> None:
    job = network.submit(chains(100, 10))
    job.wait_for_finished(500, 300)
    network.kill("worker-3")
    job.wait(400)
    check(job, 100, 10)
    finished = Counter(job.finished())
    assert len(finished) == 1000
