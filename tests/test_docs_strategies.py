"""docs/strategies.md shows the code of its example, and its reference is complete."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from support.wheelhouse import OVERRIDE, ROOT

from hypha_scheduler.jobs import specs
from hypha_scheduler.strategies import base, registry
from hypha_scheduler.strategies.diloco.retries import RESTART
from hypha_scheduler.strategies.inference.retries import LOST_SLICE
from hypha_scheduler.strategies.tasks.retries import LOST_TASK

PAGE = (ROOT / "docs" / "strategies.md").read_text()
SWEEP = ROOT / "examples" / "strategies" / "sweep"
SOURCES = {
    "python": ("src/hypha_sweep/strategy.py", "tests/test_sweep_operator.py"),
    "toml": ("pyproject.toml", "job.toml", "worker.toml"),
}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", SOURCES)
def test_blocks_are_parts_of_the_example(language: str) -> None:
    texts = [(SWEEP / name).read_text() for name in SOURCES[language]]
    found = [block for name, block in BLOCKS if name == language]
    assert found
    for block in found:
        assert any(block in text for text in texts), block


def test_the_operator_of_the_example_is_shown_completely() -> None:
    blocks = "".join(block for language, block in BLOCKS if language == "python")
    source = (SWEEP / "src/hypha_sweep/strategy.py").read_text()
    methods = re.findall(r"^    (?:async )?def (\w+)\(", source, re.MULTILINE)
    assert len(methods) > 12
    assert [name for name in methods if f"def {name}(" not in blocks] == ["__post_init__"]


def test_the_shell_lines_name_what_the_example_has() -> None:
    [block] = [block for language, block in BLOCKS if language == "bash"]
    build, install, submit = (line for line in block.splitlines())
    project = tomllib.loads((SWEEP / "pyproject.toml").read_text())["project"]
    assert (ROOT / shlex.split(build)[-1]) == SWEEP
    assert f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl" in install
    assert OVERRIDE in install
    assert "submit job.toml" in submit
    assert (SWEEP / "job.toml").is_file()


def test_the_page_of_faults_says_how_often_tasks_are_repeated() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    for policy in (RESTART, LOST_TASK, LOST_SLICE):
        assert re.search(rf"^\| {re.escape(policy.failure)} \| {policy}[; ]", page, re.MULTILINE), policy.failure


def test_other_languages_have_no_blocks() -> None:
    assert {language for language, _ in BLOCKS} == {*SOURCES, "bash"}


def rows(heading: str) -> str:
    """Return the first column of the table in a section."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    return "\n".join(re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE))


def test_every_method_of_an_operator_is_in_the_table() -> None:
    found = set(re.findall(r"`(\w+)\(", rows("Methods of an operator")))
    found |= set(re.findall(r", `(\w+)\(", rows("Methods of an operator")))
    assert found == {name for name in vars(base.Operator) if not name.startswith("_")}


def test_required_methods_are_those_without_a_default() -> None:
    required = set(re.findall(r"^\| `(\w+)\(.*\| required \|$", PAGE, re.MULTILINE))
    bodies = {name: inspect.getsource(method) for name, method in vars(base.Operator).items() if callable(method)}
    assert required == {name for name, body in bodies.items() if body.rstrip().endswith("...")}


def test_every_effect_is_in_the_table_with_its_fields() -> None:
    shown = dict(re.findall(r"`(\w+)\(([^)]*)\)`", rows("Effects")))
    kinds = get_args(base.Effect)
    assert shown == {kind.__name__: ", ".join(field.name for field in fields(kind)) for kind in kinds}


def test_every_name_of_the_boundary_is_on_the_page() -> None:
    own = {name for name, found in vars(base).items() if getattr(found, "__module__", "") == base.__name__}
    public = {name for name in own if inspect.isclass(getattr(base, name))} | {"Artifact", "DatasetView", "RoleRequest"}
    assert {name for name in public if not re.search(rf"\b{name}\b", PAGE)} == set()
    members = {name for name in vars(base.JobContext) if not name.startswith("_")}
    assert {name for name in members if f"`{name}" not in PAGE} == set()
    assert registry.GROUP in PAGE
    for name in re.findall(r"`(\w+_spec|executor_of)`", PAGE):
        assert hasattr(specs, name), name


def test_the_example_is_small_and_has_a_licence() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (SWEEP / "src").rglob("*.py"))
    assert lines < 200
    assert (SWEEP / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert Path(SWEEP / "src/hypha_sweep/py.typed").is_file()
