"""Jobs of tasks on a real network: every source, results that tasks read of each other, and what a user gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.task_network import TaskNetwork, task_network
from support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with task_network(root, workers=2, leases=2) as running:
        yield running


def python(name: str, code: str, **more: Any) -> dict[str, Any]:
    """Return a task that runs code; its inputs are settings named as its resources."""
    names = [resource["name"] for resource in more.get("resources", ())]
    settings = {"code": "import pathlib; settings = task['settings']\n" + code} | {each: each for each in names}
    return {"name": name, "driver": {"shell/python": settings}, **more}


def result(name: str, task: str, output: str) -> dict[str, Any]:
    """Return a resource that is an output of another task."""
    return {"name": name, "result": {"task": task, "output": output}}


def test_tasks_use_each_others_results_and_the_last_are_brought_home(network: TaskNetwork) -> None:
    square = "n = task['index']; pathlib.Path('square').write_text(str(n * n))"
    folder = """
pathlib.Path('made/deep').mkdir(parents=True)
pathlib.Path('made/deep/x').write_text('x')
pathlib.Path('made/y').write_text('y' * 3000000)
"""
    total = """
parts = sorted(pathlib.Path(settings['squares']).iterdir())
folder = pathlib.Path(settings['folder'])
inside = sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())
found = [len(parts), sum(int(part.read_text()) for part in parts), inside]
pathlib.Path('total.json').write_text(json.dumps(found))
"""
    tasks = [
        python("square", square, count=5, outputs={"value": "square"}),
        python("folder", folder, outputs={"made": "made"}),
        python(
            "total",
            total,
            resources=[result("squares", "square", "value"), result("folder", "folder", "made")],
            outputs={"total": "total.json"},
        ),
    ]
    job = network.submit(tasks)
    summary = job.wait(60)
    assert json.loads((job.directory / "results" / "total" / "total").read_text()) == [5, 30, ["deep/x", "y"]]
    assert sorted(path.name for path in (job.directory / "results").iterdir()) == ["total"]
    assert summary["job_id"] == job.job_id
    assert sorted(job.finished()) == sorted([*(f"square[{n}]" for n in range(5)), "folder", "total"])
    wait_until(lambda: not list(network.folders.work.glob("*/outputs*/*/*")), 60, "released outputs")


def test_files_uris_and_datasets_reach_a_task(network: TaskNetwork) -> None:
    (network.shared / "folder").mkdir(exist_ok=True)
    (network.shared / "folder" / "a.txt").write_text("from a shared folder")
    (network.shared / "b.txt").write_text("from a URL")
    code = """
read = lambda name: pathlib.Path(settings[name])
found = [read('folder').joinpath('a.txt').read_text(), read('page').read_text()]
found.append(sorted(path.name for path in read('numbers').iterdir()))
found.append(sorted(path.name for path in read('some').iterdir()))
pathlib.Path('found.json').write_text(json.dumps(found))
"""
    resources: list[dict[str, Any]] = [
        {"name": "folder", "file": {"path": str(network.shared / "folder")}},
        {"name": "page", "uri": (network.shared / "b.txt").as_uri()},
        {"name": "numbers", "dataset": {"name": "numbers"}},
        {"name": "some", "dataset": {"name": "numbers", "slices": [1]}},
    ]
    job = network.submit({**python("read", code, resources=resources, outputs={"found": "found.json"})})
    job.wait(60)
    found = json.loads((job.directory / "results" / "read" / "found").read_text())
    assert found[:2] == ["from a shared folder", "from a URL"]
    assert [name.endswith("-1.safetensors") for name in found[3]] == [True]
    assert len(found[2]) == 3


def test_pushed_results_arrive_as_well(network: TaskNetwork) -> None:
    first = python("first", "pathlib.Path('x').write_text('pushed')", outputs={"x": "x"}, count=3)
    join = "pathlib.Path('y').write_text(' '.join(p.read_text() for p in pathlib.Path(settings['x']).iterdir()))"
    second = python("second", join, resources=[result("x", "first", "x")], outputs={"y": "y"})
    job = network.submit({"type": "tasks", "transfer": "push", "tasks": [first, second]})
    job.wait(60)
    assert (job.directory / "results" / "second" / "y").read_text() == "pushed pushed pushed"
