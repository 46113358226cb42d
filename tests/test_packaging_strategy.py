"""A strategy in a wheel of its own: `examples/strategies/sweep` is built, installed beside the scheduler, and run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_network import Job, LocalNetwork, local_network
from support.wheelhouse import OVERRIDE, ROOT, Environment, empty_environment, passed, run, uv

from hypha_proto.safetensors_io import TensorFile
from hypha_proto.update_file import open_update

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SWEEP = ROOT / "examples" / "strategies" / "sweep"


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Build the example's wheel, and install it beside the scheduler's."""
    folder = tmp_path_factory.mktemp("installed")
    passed(run([*uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder / "wheel"), str(SWEEP)]))
    [wheel] = (folder / "wheel").glob("hypha_sweep-*.whl")
    with empty_environment(folder / "env", wheels) as environment:
        environment.shell(f"uv pip install --override <(echo '{OVERRIDE}') hypha-scheduler {wheel}")
        yield environment


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    chooser = (SWEEP / "worker.toml").read_text()
    for old, new in (("python3", sys.executable), ("/usr/local/lib/hypha", str(SWEEP))):
        assert old in chooser
        chooser = chooser.replace(old, new)
    with local_network(tmp_path_factory.mktemp("network"), workers=2, worker_1=chooser, worker_2=chooser) as network:
        yield network


def configuration(network: LocalNetwork) -> Path:
    """Write the configuration of a scheduler with the example's job."""
    node, _, _ = network.configuration("scheduler").read_text().partition("output_dir")
    job = (SWEEP / "job.toml").read_text().replace('"start-model"', '"../start-model"')
    for table in ("dataset", "model", "variants"):
        job = job.replace(f"[{table}]", f"[scheduler.job.{table}]")
    head = f'{node}output_dir = "../runs/sweep"\n\n[scheduler]\nstrategies = ["sweep"]\n\n[scheduler.job]\n'
    path = network.configuration("sweep")
    path.write_text(head + job)
    return path


def exits(network: LocalNetwork) -> list[int]:
    """Return how many executors of each worker have exited with status 0."""
    logs = [network.log(name) for name in network.trainers]
    assert not any("Traceback" in log for log in logs)
    return [log.count("executor exited with status 0") for log in logs]


def tensors(path: Path) -> dict[str, Any]:
    with TensorFile(path) as file:
        return {name: file.tensor(name).copy() for name in file.tensors}


def test_a_sweep_keeps_the_best_of_three_variants_on_two_leases(network: LocalNetwork, installed: Environment) -> None:
    command = [str(installed.folder / "bin" / "hypha-scheduler"), "run", "--config", str(configuration(network))]
    job = Job(network.processes.start("sweep", command), network.folders.runs / "sweep")
    status, log = job.wait(120), job.log
    assert status == 0, log
    assert "Traceback" not in log
    assert " ERROR " not in log
    [path] = job.runs.glob("*/result.json")
    result = json.loads(path.read_text())
    assert [variant["name"] for variant in result["variants"]] == ["slow", "middle", "fast"]
    assert [variant["failure"] for variant in result["variants"]] == ["", "", ""]
    assert [len(job.events(kind)) for kind in ("placement", "lease_added", "variant")] == [1, 2, 3]
    [chosen] = job.events("task_ended")[-1:]
    assert (chosen["task"], chosen["outcome"]) == ("best.variant", "finished")
    done = exits(network)
    assert sum(done) == 4, "three variants and the choice"
    assert min(done) >= 1
    check_model(result, network.folders.start_model, path.parent)


def check_model(result: dict[str, Any], start: Path, directory: Path) -> None:
    """Check that the model is the start model and the update of the variant with the lowest loss."""
    losses = {variant["name"]: variant["loss"] for variant in result["variants"]}
    assert result["best"] == min(losses, key=lambda name: float(losses[name]))
    assert len(set(losses.values())) == len(losses)
    assert result["model_dir"] == str(directory / "model")
    before, after = tensors(start / "model.safetensors"), tensors(directory / "model" / "model.safetensors")
    [best] = [variant for variant in result["variants"] if variant["name"] == result["best"]]
    update, about = open_update(directory / "updates" / best["update"])
    with update:
        assert about.samples == 400
        changed = {name for name in after if (before[name] != after[name]).any()}
        assert changed
        for name in changed:
            assert (before[name] + update.tensor(name) == after[name]).all(), name
