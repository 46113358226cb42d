"""Configurations of a scheduler with the example installed: what is accepted, and what errors say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import load_config
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.strategies import registry
from hypha_scheduler.submission.client import read_job
from hypha_scheduler.submission.server import parse_job
from hypha_sweep.strategy import SweepJob

NODE = 'cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/1.2.3.4/tcp/1"]\n'
JOB = """
[scheduler.job]
type = "sweep"
samples = 40
dataset.dataset = "digits"
model = { path = "start", type = "vision-classification" }

[scheduler.job.variants]
slow = { learning_rate = 0.001 }
"""
DILOCO = """
[scheduler.job]
dataset = "digits"
model = { path = "start", type = "vision-classification" }
inner_optimizer = { learning_rate = 0.001 }
"""
Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load configurations as if the example's wheel were installed."""
    example = SimpleNamespace(
        name="sweep",
        value="hypha_sweep.strategy:STRATEGY",
        dist=SimpleNamespace(name="hypha-sweep"),
        load=lambda: importlib.import_module("hypha_sweep.strategy").STRATEGY,
    )
    installed = {**registry._installed(), "sweep": example}
    monkeypatch.setattr(registry, "_installed", lambda: installed)

    def load(text: str) -> Any:
        file = tmp_path / "scheduler.toml"
        file.write_text(NODE + text)
        return load_config(SchedulerConfig, file, {}, {})

    return load


def error_of(load: Load, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


def test_a_job_of_the_example_is_read_beside_one_of_diloco(load: Load) -> None:
    jobs = JOB.replace("[scheduler.job]", "[[scheduler.jobs]]").replace("scheduler.job.", "scheduler.jobs.")
    loaded = load(jobs + DILOCO)
    first, second = loaded.config.jobs
    assert (first.type, second.type) == ("diloco", "sweep")
    assert isinstance(second, SweepJob)
    assert loaded.warnings == ()


@pytest.mark.parametrize("line", ["seed = 1", "rounds = { update_rounds = 3 }"])
def test_a_key_of_another_type_of_job_names_that_type(load: Load, line: str) -> None:
    found = error_of(load, JOB.replace("samples = 40", f"samples = 40\n{line}"))
    key = line.partition(" ")[0]
    assert f"scheduler.toml:9: scheduler.job.{key}" in found
    assert 'this key belongs to jobs of type = "diloco"; this job is of type = "sweep"' in found
    assert "did you mean" not in found


def test_a_misspelt_key_of_a_job_is_named(load: Load) -> None:
    found = error_of(load, JOB.replace("samples = 40", "samples = 40\nbatch_sice = 4"))
    assert "scheduler.job.batch_sice" in found
    assert "batch_size" in found
    found = error_of(load, JOB.replace("0.001 }", "0.001, bettas = [0.9, 0.9] }"))
    assert "scheduler.job.variants.slow.bettas" in found


def test_a_type_that_is_not_listed_is_refused(load: Load) -> None:
    found = error_of(load, '[scheduler]\nstrategies = ["diloco"]\n' + JOB)
    assert "'sweep' is installed, but scheduler.strategies does not list it" in found


def test_the_example_of_a_job_can_be_submitted(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text((Path(__file__).parents[1] / "job.toml").read_text())
    job = parse_job(json.dumps({"job": read_job(file)}).encode(), ["sweep"])
    assert isinstance(job, SweepJob)
    assert job.model.path == tmp_path / "start-model", "relative to the file of the job"
