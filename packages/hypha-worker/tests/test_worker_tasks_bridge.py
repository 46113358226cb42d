"""The bridge of a task: resources, outputs and progress, for executors in any language; and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.task_bridge_client import EXECUTOR

from hypha_proto.bridge_api import read_progress_update
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import LocatedFile, LocateResource, PullFiles, ResourceLocation
from hypha_proto.tasks import (
    DrainTask,
    OutputPath,
    PeersSource,
    ResultSource,
    TaskProgress,
    TaskResource,
    TaskSpec,
)

InTaskLab = Callable[..., Any]


def numbers(lab: Any) -> TaskResource:
    """Return a resource of two files, which the data peer serves."""
    return TaskResource(name="numbers", peers=PeersSource((lab.data.peer_id,), "numbers", 0, ("a", "b/c")))


FETCH = """
for body in (
    {"type": "Resource", "name": "numbers"},
    {"fetch": {"type": "Resource", "name": "numbers"}, "out_dir": "copy"},
    {"resource": {"type": "Resource", "name": "numbers"}, "path": "again"},
):
    status, files = post("/resources/fetch", body)
    assert status == 200, files
    where = body.get("out_dir") or body.get("path") or "resources/numbers"
    assert [file["path"] for file in files] == [where + "/a", where + "/b/c"], files
    assert [open(file["path"]).read() for file in files] == ["slice 0", "slice 1"]
    assert [file["size"] for file in files] == [7, 7]
    assert files[0]["checksum"].startswith("blake3:"), files
status, files = post("/resources/fetch", {"type": "Resource", "name": "one"})
assert [file["path"] for file in files] == ["resources/one"], files
status, files = post("/resources/fetch", {"fetch": {"type": "Resource", "name": "one"}, "out_dir": "single"})
assert open("single/one").read() == "slice 1", files
status, answer = post("/resources/fetch", {"type": "Resource", "name": "other"})
assert (status, answer["error"]) == (404, "not-found"), answer
assert "numbers" in answer["detail"], answer
status, answer = post("/resources/fetch", {"fetch": {"type": "Resource", "name": "one"}, "out_dir": "../x"})
assert status == 400, answer
"""


async def test_a_task_fetches_its_resources(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        lab.serve_slices(1)
        one = TaskResource(name="one", peers=PeersSource((lab.data.peer_id,), "numbers", 1))
        tasks.start(lease, "t", FETCH, resources=(numbers(lab), one))
        assert (await tasks.end("t")).finished is not None


COPIES = """
status, files = post("/resources/fetch", {"fetch": {"type": "Resource", "name": "b"}, "out_dir": "copy"})
assert status == 200, files
status, answer = post("/resources/send", {"send": {"type": "Resource", "name": "out"}, "path": "resources/a"})
assert status == 200, answer
status, answer = post("/resources/send", {"send": {"type": "Resource", "name": "out"}, "path": "resources/b"})
assert status == 507, answer
status, answer = post("/resources/fetch", {"fetch": {"type": "Resource", "name": "b"}, "out_dir": "more"})
assert status == 507 and os.listdir("more") == [], answer
os.unlink("copy/b")
status, answer = post("/resources/send", {"send": {"type": "Resource", "name": "out"}, "path": "resources/b"})
assert status == 200, answer
os.unlink("resources/a")
status, files = post("/resources/fetch", {"fetch": {"type": "Resource", "name": "b"}, "out_dir": "copy"})
assert status == 200, files
"""


async def test_each_copy_counts_once_against_the_storage(in_task_lab: InTaskLab) -> None:
    """There is room for four copies of a file: three in the work directory, and one in the store."""
    resources = {"cpu": 2.0, "memory": 4.0, "storage": 1.0, "default": {"storage": 0.0055}}
    async with in_task_lab(executors=[EXECUTOR], resources=resources) as (lab, tasks, lease):
        tasks.start(lease, "producer", "open('x', 'w').truncate(1_000_000)", outputs={"out": "x"})
        [output] = (await tasks.success("producer")).outputs
        [file] = output.files
        located = LocatedFile(
            path="", dataset=output.dataset, index=0, size=file.size, digest=file.digest, peers=(lab.peer,)
        )

        async def locate(_peer: PeerId, _question: LocateResource) -> ResourceLocation:
            return ResourceLocation(pull=PullFiles((located,)))

        tasks.locate = locate
        resources = tuple(TaskResource(name=name, result=ResultSource("producer", "out")) for name in "ab")
        tasks.start(lease, "t", COPIES, resources=resources, outputs={"out": "x"})
        await tasks.success("t")


SEND = """
open("made", "w").write("first")
status, answer = post("/resources/send", {"send": {"type": "Resource", "name": "early"}, "path": "made"})
assert status == 200, answer
open("made", "w").write("second")
status, answer = post("/resources/send", {"send": {"type": "Resource", "name": "early"}, "path": "made"})
assert (status, answer["output"], answer["size"]) == (200, "early", 6), answer
[file] = answer["files"]
assert (file["path"], file["size"]) == ("", 6) and file["checksum"].startswith("blake3:"), file
open("made", "w").write("it is mine again")
os.mkdir("folder"); open("folder/x", "w").write("x")
status, answer = post("/resources/send", {"resource": {"type": "Resource", "name": "folder"}, "path": "folder"})
assert (status, [file["path"] for file in answer["files"]]) == (200, ["x"]), answer
open("late", "w").write("late")
os.symlink("/etc", "link")
for body, wanted in (
    ({"send": {"type": "Resource", "name": "unknown"}, "path": "made"}, "no output 'unknown'"),
    ({"send": {"type": "Resource", "name": "late"}, "path": "missing"}, "made no 'missing'"),
    ({"send": {"type": "Resource", "name": "late"}, "path": "../x"}, "relative path"),
    ({"send": {"type": "Resource", "name": "late"}, "path": ""}, "path is empty"),
    ({"send": {"type": "Resource", "name": "late"}, "path": "link/hostname"}, "symbolic link"),
    ({"send": {"type": "Resource", "name": 3}, "path": "made"}, "expected text"),
):
    status, answer = post("/resources/send", body)
    assert status == 400 and wanted in answer["detail"], answer
"""


async def test_a_task_sends_an_output_while_it_runs(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        tasks.start(lease, "t", SEND, outputs={"early": "early", "folder": "elsewhere", "late": "late"})
        finished = await tasks.success("t")
        assert await lab.content_of(finished, "early") == b"second"
        assert await lab.content_of(finished, "folder") == b"x"
        assert await lab.content_of(finished, "late") == b"late"
        assert len(lab.worker.outputs.held) == 3, "the first one was replaced"
        tasks.start(lease, "u", SEND + "sys.exit(1)", outputs={"early": "early", "folder": "folder", "late": "late"})
        assert (await tasks.end("u")).failed is not None
        assert len(lab.worker.outputs.held) == 3, "outputs of a failed attempt are removed"


UPDATE = """
status, answer = post("/task/update", {"fraction": 0.25, "message": "a\\nline", "metrics": {"loss": 1.5}})
assert (status, answer) == (200, {"draining": False}), answer
for body in ({"fraction": 1.5}, {"fraction": "x"}, {"other": 1}, [], {"message": "x" * 1001}, {"metrics": {"": 1}}):
    status, answer = post("/task/update", body)
    assert (status, answer["error"]) == (400, "bad-request"), answer
while not (answer := post("/task/update", {"fraction": 0.5})[1])["draining"]:
    time.sleep(0.01)
assert 0 < answer["seconds_left"] <= 30, answer
for number in range(50):
    post("/task/update", {"fraction": 0.75, "metrics": {"step": number}})
"""


async def test_a_task_reports_progress_and_hears_that_it_drains(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (_lab, tasks, lease):
        tasks.start(lease, "t", UPDATE)
        await tasks.until(lambda: "progress" in tasks.kinds("t"))
        tasks.define(lease, "t", drain=DrainTask(30_000, "the worker drains"))
        assert (await tasks.end("t")).finished is not None, "it ended by itself"
        progress = [report.progress for report in tasks.of("t") if report.progress is not None]
        assert progress[0] == TaskProgress(fraction=0.25, message="a line", metrics={"loss": 1.5})
        assert progress[-1] == TaskProgress(fraction=0.75, metrics={"step": 49.0})
        assert tasks.kinds("t").count("draining") == 1


REFUSED = """
stranger = "12D3KooWRm8J3iL796zPFi2EtGGtUJn58AG67gcqRLvNLQXkmDoe"
peers = {"type": "Peers", "peers": [stranger], "strategy": "All", "resource": {"dataset": "d", "index": 0}}
open("file", "w").close()
named = dict(peers, peers=[task["settings"]["data"]], resource={"dataset": "numbers", "index": 2})
for path, body, status, wanted in (
    ("/resources/fetch", {"fetch": peers, "out_dir": "x"}, 403, "none of this task's references"),
    ("/resources/send", {"send": peers, "path": "file"}, 403, "none of this task's references"),
    ("/resources/fetch", {"type": "scheduler", "peer": stranger, "dataset": "d"}, 403, "no data of its scheduler"),
    ("/resources/fetch", {"type": "uri", "value": "http://example.org/x"}, 403, "connectors.hosts"),
    ("/resources/receive", {"receive": dict(peers, peers=[]), "out_dir": "x"}, 400, "has no files of peers"),
    ("/resources/receive", {"receive": {"type": "Resource", "name": "x"}, "out_dir": "x"}, 400, "receive"),
    ("/status/send", "update", 400, "use /task/update"),
    ("/status/send", {"status": {"batch_size": 1}}, 400, "use /task/update"),
):
    found, answer = post(path, body)
    assert found == status and wanted in answer["detail"], (path, body, found, answer)
status, answer = post("/resources/fetch", {"fetch": named, "out_dir": "x"})
assert status == 200 and open(answer[0]["path"]).read() == "slice 2", answer
"""


async def test_a_task_reaches_only_what_its_definition_names(in_task_lab: InTaskLab) -> None:
    async with in_task_lab(executors=[EXECUTOR]) as (lab, tasks, lease):
        lab.serve_slices(1)
        settings = {"data": str(lab.data.peer_id)}
        tasks.start(lease, "t", REFUSED, resources=(numbers(lab),), settings=settings)
        await tasks.success("t")


async def test_a_task_that_trains_has_no_resources_and_reports_progress_as_others(in_lab: Any) -> None:
    script = """
for path, body, expected in (
    ("/resources/fetch", {"type": "Resource", "name": "model"}, 404),
    ("/resources/send", {"send": {"type": "Resource", "name": "model"}, "path": "x"}, 400),
    ("/task/update", {"fraction": 0.5}, 200),
):
    status, answer = post(path, body)
    assert status == expected, answer
"""
    async with in_lab() as lab:
        await lab.start(script)
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end


def script_of_docs() -> str:
    """Return the shell script in docs/executor.md."""
    page = (Path(__file__).parents[3] / "docs" / "executor.md").read_text()
    [script] = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    return str(script)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_shell_script_with_curl_is_an_executor(in_task_lab: InTaskLab, tmp_path: Path) -> None:
    script = script_of_docs()
    assert len(script.splitlines()) <= 30
    (tmp_path / "count.sh").write_text(script)
    shell = {
        "class": "shell",
        "name": "count",
        "cmd": "sh",
        "args": [str(tmp_path / "count.sh"), "{SOCKET_PATH}", "{JOB_FILE}"],
    }
    async with in_task_lab(executors=[shell], requested="count") as (lab, tasks, lease):
        lab.serve_slices(1)
        outputs = (OutputPath("counts", "counts.txt"),)
        resources = (TaskResource(name="text", peers=numbers(lab).peers),)
        spec = TaskSpec(executor="count", resources=resources, outputs=outputs, settings=json.dumps({"text": "text"}))
        tasks.define(lease, "t", start=spec)
        finished = await tasks.success("t")
        assert (await lab.content_of(finished, "counts")).split() == [
            b"2",
            b"resources/text/a",
            b"2",
            b"resources/text/b/c",
        ]
        progress = [report.progress for report in tasks.of("t") if report.progress is not None]
        assert progress[-1].fraction == 1.0


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"metrics": {"x": 1e999}}', b'{"fraction": -0.1}', b"\xff", b'{"x": 1}']
)
def test_an_update_that_cannot_be_used_is_named(body: bytes) -> None:
    with pytest.raises(DecodeError):
        read_progress_update(body)
