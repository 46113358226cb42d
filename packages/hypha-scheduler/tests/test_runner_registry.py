"""Strategies are found by entry points: a job of a third party's type runs, unknown and failing ones are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from support.scripted_jobs import OpenJobs, ScriptedJob, ScriptedStrategy

from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.strategies import registry
from hypha_scheduler.strategies.registry import GROUP, known_types, load_strategy, parse_job

pytestmark = pytest.mark.virtual_clock

MODULE = """
from support.scripted_jobs import ScriptedStrategy
STRATEGY = ScriptedStrategy()
"""


@pytest.fixture(autouse=True)
def _entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a strategy, and one whose module raises."""
    (tmp_path / "third_party.py").write_text(MODULE)
    (tmp_path / "broken_party.py").write_text("raise KeyError('a bug')")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {
        "diloco": ("hypha-scheduler", "hypha_scheduler.strategies.diloco.strategy"),
        "scripted": ("third-party", "third_party"),
        "third_party": ("third-party", "third_party"),
        "broken_party": ("broken-party", "broken_party"),
    }
    installed = [
        EntryPoint(name, f"{module}:STRATEGY", GROUP)._for(SimpleNamespace(name=wheel))
        for name, (wheel, module) in points.items()
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: installed if group == GROUP else [])
    registry._installed.cache_clear()
    registry._load.cache_clear()
    yield
    monkeypatch.undo()
    registry._installed.cache_clear()
    registry._load.cache_clear()
    sys.modules.pop("third_party", None)


async def test_job_of_an_installed_strategy_runs(open_jobs: OpenJobs) -> None:
    job = parse_job({"type": "scripted", "seconds": 5})
    assert job == ScriptedJob(seconds=5)
    strategy = load_strategy(job.type)
    assert isinstance(strategy, ScriptedStrategy)
    async with open_jobs(strategy) as lab:
        operator = await lab.acquire(ScriptedJob(seconds=5))
        await lab.finish(operator)
        assert isinstance(lab.results[0], Path)


def test_unknown_restricted_and_failing_strategies_are_named() -> None:
    assert known_types() == ("broken_party", "diloco", "scripted", "third_party")
    with pytest.raises(
        JobRefusedError, match=r"known: broken_party, diloco, scripted, third_party; did you mean 'scripted'"
    ):
        load_strategy("scriptd")
    with pytest.raises(JobRefusedError, match=r"'scripted' is installed, but scheduler.strategies does not list it"):
        load_strategy("scripted", ["diloco"])
    with pytest.raises(JobRefusedError, match=r"broken_party:STRATEGY\) cannot be loaded: KeyError\('a bug'\)"):
        load_strategy("broken_party")


def test_key_of_another_type_is_refused_with_that_type() -> None:
    with pytest.raises(ValidationError, match='belongs to jobs of type = "diloco"; this job is of type = "scripted"'):
        parse_job({"type": "scripted", "rounds": {}})
