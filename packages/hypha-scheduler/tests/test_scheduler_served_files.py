"""Tasks of any executor whose resources are files of the strategy's own."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.tasks import OutputPath
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.jobs.resource_locations import ServedFiles, checked_location
from hypha_scheduler.jobs.specs import task_spec

HERE = PeerId.from_public_key(bytes(32))


class Context:
    """Part of `JobContext` that is used."""

    job_id = uuid.UUID(int=7)
    scheduler = HERE


def served(files: dict[str, Path | bytes]) -> ServedFiles:
    context: Any = Context()
    return ServedFiles(context, "results", files)


def test_the_files_are_located_here_and_served_as_they_are_requested(tmp_path: Path) -> None:
    files = served({"a.json": b"{}", "deep/b.bin": tmp_path / "b"})
    answer, _ = checked_location((files.location(), ()))
    assert answer.pull is not None
    assert [(file.path, file.peers) for file in answer.pull.files] == [("a.json", (HERE,)), ("deep/b.bin", (HERE,))]
    found = [files.resolve(PullRequest(dataset=file.dataset, index=file.index)) for file in answer.pull.files]
    assert found == [PullSource(b"{}"), PullSource(tmp_path / "b")]


def test_other_files_are_refused() -> None:
    files = served({"a": b"1"})
    for wrong in (
        PullRequest(dataset=files.dataset, index=1),
        PullRequest(dataset=f"{uuid.UUID(int=8)}/results", index=0),
        PullRequest(dataset="digits", index=0),
    ):
        assert isinstance(files.resolve(wrong), Refusal)


def test_a_resource_without_files_is_located_and_empty() -> None:
    answer = served({}).location()
    assert answer.pull is not None
    assert answer.pull.files == ()


def test_a_task_names_its_resources_and_outputs() -> None:
    spec = task_spec("shell/bash", {"input": "data", "n": 3}, resources=("data",), outputs={"best": "out/best"})
    assert (spec.executor, json.loads(spec.settings)) == ("shell/bash", {"input": "data", "n": 3})
    [resource] = spec.resources
    assert resource.name == "data"
    assert resource.result is not None
    assert spec.outputs == (OutputPath(name="best", path="out/best"),)
    assert task_spec("shell/bash", {}).resources == ()
