"""docs/tasks.md: its jobs are valid, and its tables name every key."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from hypha_scheduler.strategies.tasks import config
from hypha_scheduler.submission.client import read_job
from hypha_scheduler.submission.validation import validate_job

PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()


def section(heading: str) -> str:
    return PAGE.split(f"\n### {heading}\n")[1].split("\n### ")[0]


def test_the_jobs_of_the_page_are_valid(tmp_path: Path) -> None:
    [tasks] = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "tasks.json").write_text(tasks)
    validate_job(read_job(tmp_path / "tasks.json"))
    [text] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    validate_job(tomllib.loads(text))
    assert len(json.loads(tasks)) == 2


@pytest.mark.parametrize(("heading", "model"), [("The job", config.TasksJob), ("A task", config.TaskTable)])
def test_tables_name_every_key(heading: str, model: type[BaseModel]) -> None:
    assert re.findall(r"^\| `(\w+)` \|", section(heading), re.MULTILINE) == list(model.model_fields)


@pytest.mark.parametrize("source", [name for name in config.ResourceTable.model_fields if name != "name"])
def test_every_source_is_on_the_page_with_its_keys(source: str) -> None:
    [keys] = re.findall(rf"^\| `{source} = {{ ([^}}]*) }}` \|", section("Sources"), re.MULTILINE)
    tables = {
        "result": config.ResultTable,
        "dataset": config.DatasetSourceTable,
        "huggingface": config.HuggingFaceTable,
        "peers": config.PeersTable,
        "file": config.FileTable,
        "uri": config.UriTable,
        "s3": config.S3Table,
        "dht": config.DhtTable,
    }
    assert sorted(keys.split(", ")) == sorted(tables[source].model_fields)
