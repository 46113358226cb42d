"""Job tables of ``type = "tasks"``: what is valid, and that all that is wrong is said at once."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.tasks import (
    DatasetSource,
    FileSource,
    OutputPath,
    PeersSource,
    ResultSource,
    TaskResource,
    TaskSpec,
    UriSource,
)
from hypha_scheduler.cli import main
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.graph import TaskGraph
from hypha_scheduler.submission.client import JobFileError, read_job
from hypha_scheduler.submission.server import parse_job
from hypha_scheduler.submission.validation import validate_job

PEER = str(PeerId.from_public_key(bytes(32)))
SPLIT: dict[str, Any] = {
    "name": "split",
    "driver": {"shell/bash": {"script": "script", "parts": 3, "inner": {"list": ["data"]}}},
    "resources": [
        {"name": "data", "dataset": {"name": "digits", "slices": [0, 2]}},
        {"name": "script", "uri": "https://example.org/split.sh"},
        {"name": "model", "huggingface": {"repository": "owner/name", "filenames": ["a.json"], "token": "hf_secret"}},
        {"name": "share", "file": "/mnt/share/x"},
        {"name": "piece", "peers": {"peers": [PEER], "dataset": "digits", "index": 4}},
    ],
    "outputs": {"parts": "out/parts", "log": "log.txt"},
    "needs": {"cpu": 2, "memory": 4},
}
TRAIN: dict[str, Any] = {
    "name": "train",
    "driver": {"bash": {}},
    "resources": [{"name": "parts", "result": {"task": "split", "output": "parts"}}],
    "outputs": {"model": "model"},
    "count": 3,
    "retries": 0,
    "timeout": 60,
}
MERGE: dict[str, Any] = {
    "name": "merge",
    "driver": {"bash": {}},
    "resources": [{"name": "models", "result": {"task": "train", "output": "model"}}],
    "outputs": {"model": "merged"},
    "needs": {"gpu": 8},
}
JOB: dict[str, Any] = {"type": "tasks", "tasks": [MERGE, SPLIT, TRAIN]}


def faults(job: dict[str, Any]) -> list[str]:
    """Return the lines that say what is wrong, without the remedies below them."""
    with pytest.raises(ValueError, match=r".") as caught:
        validate_job(job)
    return [line for line in str(caught.value).splitlines() if not line.startswith("    ")]


def with_task(**changes: Any) -> dict[str, Any]:
    """Return a job of one task, changed."""
    return {"type": "tasks", "tasks": [{"name": "a", "driver": {"x": {}}} | changes]}


def test_tasks_are_in_an_order_in_which_each_follows_what_it_uses() -> None:
    graph = TaskGraph(TasksJob.model_validate(JOB))
    assert list(graph.tasks) == ["split", "train", "merge"]
    assert graph.tasks["train"].names == ("train[0]", "train[1]", "train[2]")
    assert [task.first for task in graph.tasks.values()] == [0, 1, 4]
    assert {name: task.keep for name, task in graph.tasks.items()} == {
        "split": {"log"},
        "train": set(),
        "merge": {"model"},
    }


def test_leases_are_asked_for_by_driver_and_needs() -> None:
    graph = TaskGraph(TasksJob.model_validate(JOB))
    assert [role.name for role in graph.roles] == ["shell/bash", "bash", "bash 2"]
    specs = {role.name: role.spec for role in graph.roles}
    assert specs["shell/bash"].executor == (ExecutorDescriptor("shell", "bash"),)
    assert (specs["shell/bash"].resources.cpu, specs["shell/bash"].resources.memory) == (2, 4)
    assert specs["bash"].executor == specs["bash 2"].executor == (ExecutorDescriptor("", "bash"),)
    assert specs["bash 2"].resources.gpu == 8


def test_every_source_is_sent_as_it_was_written() -> None:
    graph = TaskGraph(TasksJob.model_validate(JOB))
    assert graph.tasks["split"].spec(0) == TaskSpec(
        executor="shell/bash",
        settings=json.dumps(SPLIT["driver"]["shell/bash"]),
        resources=(
            TaskResource(name="data", dataset=DatasetSource(name="digits", slices=(0, 2))),
            TaskResource(name="script", uri=UriSource(value="https://example.org/split.sh")),
            TaskResource(
                name="model",
                huggingface=HuggingFaceReference(repository="owner/name", filenames=("a.json",), token="hf_secret"),
            ),
            TaskResource(name="share", file=FileSource(path="/mnt/share/x")),
            TaskResource(name="piece", peers=PeersSource(peers=(PeerId.parse(PEER),), dataset="digits", index=4)),
        ),
        outputs=(OutputPath(name="parts", path="out/parts"), OutputPath(name="log", path="log.txt")),
    )
    train = graph.tasks["train"].spec(2)
    assert train.resources == (TaskResource(name="parts", result=ResultSource(task="split", output="parts")),)
    assert (train.index, train.count, train.timeout_ms) == (2, 3, 60_000)


def test_a_token_is_in_nothing_that_is_written() -> None:
    job = TasksJob.model_validate(JOB)
    assert "hf_secret" not in json.dumps(job.model_dump(mode="json"))
    changed = copy.deepcopy(JOB)
    changed["tasks"][1]["resources"][2]["huggingface"]["token"] = "another"
    assert TaskGraph(TasksJob.model_validate(changed)).digest() == TaskGraph(job).digest()


def test_all_that_is_wrong_is_said_at_once() -> None:
    job = {
        "type": "tasks",
        "workers": 0,
        "tasks": [
            {"name": "a", "driver": {}, "outputs": {"o": "../x"}, "resources": [{"name": "r"}]},
            {"name": "a", "driver": {"x": {}, "y": {}}, "retires": 1},
            {
                "name": "b",
                "driver": {"x:y": {}},
                "resources": [{"name": "r", "result": {"task": "c", "output": "o"}}],
                "outputs": {"o": "out"},
            },
            {
                "name": "c",
                "driver": {"x": {}},
                "resources": [
                    {"name": "r", "result": {"task": "b", "output": "o"}},
                    {"name": "s", "result": {"task": "bb", "output": "o"}},
                    {"name": "t", "result": {"task": "b", "output": "oo"}},
                ],
                "outputs": {"o": "out"},
            },
        ],
    }
    found = "\n".join(faults(job))
    for line in (
        "tasks[0].driver: must name one executor, not 0 (none)",
        "tasks[0].resources[0]: has no source; set exactly one of result, ",
        "tasks[0].outputs.o = '../x': is not inside the work directory; name a relative path",
        "tasks[1].name = 'a': is the name of tasks[0], too; give each task a name of its own",
        "tasks[1].driver: must name one executor, not 2 (x, y)",
        "tasks[1].retires: is not a key of [tasks[1]]",
        "tasks[2].driver: 'x:y' is not an executor; write its name, or class/name such as shell/bash",
        "tasks[3].resources[0].result.task = 'b': these tasks wait for each other (b → c → b",
        "tasks[3].resources[1].result.task = 'bb': is not a task of this job; did you mean 'b'?",
        "tasks[3].resources[2].result.output = 'oo': is not an output of task 'b'; did you mean 'o'?",
        "workers = 0: input should be greater than or equal to 1",
    ):
        assert line in found


NO_TABLE = 'must be a table, {key = value} or in JSON {"key": value}'


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "x:a"}, "is not a name: 1 to 64 letters"),
        ({"name": "a" * 65}, "is not a name"),
        ({"driver": {"../x": {}}}, "is not an executor; write its name, or class/name"),
        ({"driver": {"x": {"y": float("nan")}}}, "the settings cannot be sent"),
        ({"driver": {"x": {"y": "z" * 70_000}}}, "settings of 70009 bytes are over 65536; pass a file as a resource"),
        ({"driver": {"x": {"y": "\ud800"}}}, "half of a surrogate pair"),
        ({"driver": {"x": {"y": json}}}, "is not JSON"),
        ({"outputs": {"o": "/out"}}, "is not inside the work directory"),
        ({"outputs": {"o": "."}}, "is not inside the work directory"),
        ({"outputs": {"o": "resources/x"}}, "is in the folder of the inputs, resources"),
        ({"outputs": {"o": "out", "p": "out/x"}}, "'out' and 'out/x', which overlap"),
        ({"outputs": {"o": "x" * 256}}, "is longer than 255 bytes"),
        ({"keep": ["o"]}, "'o' is not an output of this task"),
        ({"count": 10_001}, "less than or equal to 10000"),
        ({"timeout": 0}, "greater than 0"),
        ({"resources": [{"name": "r", "peers": {"peers": [], "dataset": "d"}}]}, "is empty; list at least one"),
        ({"needs": {"tpu": 1}}, "is not a key of [tasks[0].needs]"),
        ({"resources": [{"name": "r", "uri": "ftp://x"}]}, "must be a URL that starts with https://"),
        ({"resources": [{"name": "r", "file": "data.csv"}]}, "is not an absolute path without .."),
        ({"resources": [{"name": "r", "file": "/a/../b"}]}, "is not an absolute path without .."),
        ({"resources": [{"name": "r", "s3": {"bucket": "my-bucket"}}]}, "key"),
        ({"resources": [{"name": "r", "s3": {"bucket": "b/..", "key": "k"}}]}, "bucket"),
        (
            {"resources": [{"name": "r", "dht": {"sha256": "abcdef1234567890"}}]},
            "has 16 characters, not the 64",
        ),
        ({"resources": [{"name": "r", "uri": "https://x/", "file": "/x"}]}, "has 2 sources, file and uri"),
        ({"resources": [{"name": "r", "peers": {"peers": ["x"], "dataset": "d"}}]}, "write a peer id such as"),
        ({"resources": [{"name": "r", "file": "/x"}, {"name": "r", "file": "/y"}]}, "several resources are named 'r'"),
        ({"outputs": {"o": "x"}, "resources": [{"name": "r", "result": {"task": "a", "output": "o"}}]}, "(a → a)"),
        ({"driver": "shell/bash"}, f".driver = 'shell/bash': {NO_TABLE}"),
        ({"resources": [{"name": "r", "result": "b"}]}, f".resources[0].result = 'b': {NO_TABLE}"),
        ({"outputs": []}, f".outputs = []: {NO_TABLE}"),
        ({"keep": "o"}, ".keep = 'o': must be a list, [value]"),
    ],
)
def test_a_fault_names_its_place_and_a_remedy(changes: dict[str, Any], said: str) -> None:
    [line] = faults(with_task(**changes))
    assert line.startswith("tasks[0]")
    assert said in line


def test_instances_of_all_tasks_are_limited() -> None:
    tasks = [{"name": name, "driver": {"x": {}}, "count": 6000} for name in "ab"]
    [line] = faults({"type": "tasks", "tasks": tasks})
    assert "12000 instances of tasks are over the limit of 10000; divide the job into several" in line


def test_a_job_without_tasks_is_refused() -> None:
    assert faults({"type": "tasks", "tasks": []}) == ["tasks = []: is empty; list at least one"]


def test_a_long_cycle_is_found_and_shown_in_part() -> None:
    tasks = [
        {
            "name": f"t{number}",
            "driver": {"x": {}},
            "outputs": {"o": "o"},
            "resources": [{"name": "r", "result": {"task": f"t{(number + 1) % 3000}", "output": "o"}}],
        }
        for number in range(3000)
    ]
    [line] = faults({"type": "tasks", "tasks": tasks})
    assert "t0 → t1 → " in line
    assert "→ … →" in line
    assert "t2999 → t0" in line


def test_job_files(tmp_path: Path) -> None:
    for content in (JOB["tasks"], JOB, {"tasks": JOB["tasks"]}):
        (tmp_path / "tasks.json").write_text(json.dumps(content))
        assert read_job(tmp_path / "tasks.json") == JOB
    (tmp_path / "tasks.json").write_text(json.dumps(SPLIT))
    assert read_job(tmp_path / "tasks.json") == {"type": "tasks", "tasks": [SPLIT]}
    (tmp_path / "job.toml").write_text(
        '[scheduler.job]\ntype = "tasks"\nworkers = 2\n[[scheduler.job.tasks]]\nname = "a"\ndriver.bash = { x = 1 }\n'
    )
    assert TasksJob.model_validate(read_job(tmp_path / "job.toml")).tasks[0].settings == {"x": 1}
    for text in ("", "7", '{"a": 1, "a": 2}', "[" * 100):
        (tmp_path / "tasks.json").write_text(text)
        with pytest.raises(JobFileError, match=r"tasks\.json: "):
            read_job(tmp_path / "tasks.json")


def test_run_checks_tasks_in_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "scheduler.toml"
    arguments = ["run", "--check", "--config", str(config)]
    config.write_text('[scheduler.job]\ntype = "tasks"\n[[scheduler.job.tasks]]\nname = "a b"\ndriver.bash = {}\n')
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "scheduler.job.tasks[0].name = 'a b': is not a name" in done.output


def mutated(chance: random.Random, value: Any) -> Any:
    """Return a value with one part replaced, removed, repeated or renamed."""
    paths = list(_paths(value))
    *parents, last = chance.choice(paths)
    holder = changed = copy.deepcopy(value)
    for part in parents:
        holder = holder[part]
    odd = [None, True, -1, 1e400, 10**30, "", "\x00", "\ud800", "../..", "a" * 3000, [], {}, [[]], {"": {}}, "split"]
    match chance.randrange(4):
        case 0:
            holder[last] = chance.choice(odd)
        case 1:
            del holder[last]
        case 2:
            holder[last] = copy.deepcopy(_at(value, chance.choice(paths)))
        case _ if isinstance(holder, dict):
            holder[chance.choice(["name", "result", "x", "\ud800", "x:y", "s3"])] = holder.pop(last)
        case _:
            holder.append(copy.deepcopy(holder[last]))
    return changed


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(inner))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def parsed(job: dict[str, Any]) -> TasksJob | None:
    """Return a job, or None if it is refused with an explanation of our own."""
    try:
        found = parse_job(json.dumps({"job": job}).encode())
    except ValidationError:
        raise
    except ValueError as error:
        return None if str(error) else pytest.fail("no explanation")
    assert isinstance(found, TasksJob)
    return found


@pytest.mark.parametrize("chunk", [0, 1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 10))])
def test_mutated_jobs_are_refused_or_valid(chunk: int) -> None:
    chance = random.Random(chunk)
    outcomes = {"valid": 0, "refused": 0}
    for _ in range(1000):
        job = JOB
        for _ in range(chance.choice([1, 1, 2, 3])):
            job = mutated(chance, job) if job else job
        job = {**job, "type": "tasks"}  # otherwise it is of another strategy
        found = parsed(job)
        if found is None:
            outcomes["refused"] += 1
            continue
        graph = TaskGraph(found)
        for task in graph.tasks.values():
            task.spec(0)
        outcomes["valid"] += 1
    assert min(outcomes.values()) > 50


def test_a_token_that_workers_get_is_a_warning() -> None:
    assert TasksJob.model_validate({"type": "tasks", "tasks": [SPLIT]}).warnings() == []
    handed = copy.deepcopy(SPLIT)
    handed["resources"][2]["huggingface"]["serve"] = False
    [warning] = TasksJob.model_validate({"type": "tasks", "tasks": [handed]}).warnings()
    assert warning.startswith("tasks[0].resources[2].huggingface.token is handed to every worker")
    assert "hf_secret" not in warning
