"""Random graphs of tasks with random faults: every task finishes, and what is kept is here, whatever goes wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.task_simulation import Chances, Simulation, run_simulation

from hypha_scheduler.strategies.tasks.config import TasksJob

SEEDS = [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(25)]
FAULTS: dict[str, Chances] = {
    "none": Chances(),
    "failed attempts": Chances(faults=3, attempt_fails=0.2, attempt_given_back=0.2, not_started=0.05),
    "killed workers": Chances(faults=5, worker_killed=0.02),
    "lost leases": Chances(faults=8, lease_lost=0.05),
    "lost outputs": Chances(faults=8, output_removed=0.1, unreachable=0.1),
    "drained workers": Chances(faults=4, worker_drained=0.02),
    "restarts": Chances(faults=4, restart=0.02),
    "everything": Chances(9, 0.02, 0.02, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02),
}


def random_job(seed: int) -> TasksJob:
    """Return a job whose tasks use results of earlier ones, listed in any order."""
    chance = random.Random(seed)
    tasks: list[dict[str, Any]] = []
    for number in range(chance.randint(1, 9)):
        used = chance.sample(tasks, min(len(tasks), chance.choice([0, 1, 1, 2, 3])))
        results = [{"task": maker["name"], "output": chance.choice(list(maker["outputs"]))} for maker in used]
        task = {
            "name": f"t{number}",
            "driver": {chance.choice(["shell/a", "shell/a", "b"]): {}},
            "resources": [{"name": f"r{index}", "result": result} for index, result in enumerate(results)],
            "outputs": {f"o{index}": f"out/{index}" for index in range(chance.randint(1, 2))},
            "needs": {"cpu": chance.choice([1, 1, 2])},
            "count": chance.choice([1, 1, 1, 3]),
            "retries": 3,
            "timeout": chance.choice([None, 600.0]),
        }
        if chance.random() < 0.2:
            task["keep"] = chance.choice([[], ["o0"]])
        tasks.append(task)
    chance.shuffle(tasks)
    return TasksJob.model_validate(
        {"type": "tasks", "tasks": tasks, "workers": chance.randint(1, 4), "transfer": chance.choice(["pull", "push"])}
    )


def copy_of(chances: Chances) -> Chances:
    return Chances(**vars(chances))


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_finishes_and_what_is_kept_is_here(faults: str, seed: int, tmp_path: Path) -> None:
    job = random_job(seed)
    simulation = Simulation(job, seed, copy_of(FAULTS[faults]), tmp_path)
    run_simulation(simulation)
    assert simulation.ended is not None
    assert simulation.ended.failure is None
    names = [name for task in simulation.operator.graph.tasks.values() for name in task.names]
    assert set(simulation.finished) >= set(names)
    assert simulation.most_leases <= job.workers
    summary: Any = json.loads(json.dumps(simulation.operator.summary({})))
    assert sorted(task["task"] for task in summary["tasks"]) == sorted(names)
    used = {(r.result.task, r.result.output) for task in job.tasks for r in task.resources if r.result is not None}
    for task in job.tasks:
        kept = [name for name in task.outputs if (task.name, name) not in used] if task.keep is None else task.keep
        for output in kept:
            folder = tmp_path / "results" / task.name / output
            if task.count == 1:
                assert folder.read_text() == f"{task.name}.{output}"
            else:
                assert sorted(path.name for path in folder.iterdir()) == [str(index) for index in range(task.count)]
    left = [name for worker in simulation.workers.values() if worker.is_alive for name in worker.store]
    assert left == [] or faults not in ("none", "failed attempts"), "outputs that nothing needs are released"
    assert not (tmp_path / "copies").exists()
    assert not list((tmp_path / "incoming").glob("*"))
    if faults == "none":
        assert set(simulation.finished.values()) == {1}


VICES = {
    "attempts fail": ["attempt_fails"] * 3,
    "attempts are given back": ["attempt_given_back"] * 3,
    "attempts do not start": ["not_started"] * 3,
    "leases are lost": ["lease_lost"] * 3,
    "each another": ["attempt_fails", "attempt_given_back", "lease_lost"],
}


@pytest.mark.parametrize("vices", VICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_finishes_if_one_worker_is_healthy(vices: str, seed: int, tmp_path: Path) -> None:
    job = random_job(seed)
    simulation = Simulation(job, seed, Chances(), tmp_path, workers=1, vices=VICES[vices])
    run_simulation(simulation)
    assert simulation.ended is not None
    assert simulation.ended.failure is None
    names = {name for task in simulation.operator.graph.tasks.values() for name in task.names}
    assert set(simulation.finished) == names
    excluded: Any = simulation.operator.summary({})["excluded"]
    healthy = next(str(worker.peer) for worker in simulation.workers.values() if worker.vice is None)
    assert healthy not in [found["worker"] for found in excluded]
