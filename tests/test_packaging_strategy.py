"""A strategy in a wheel of its own: `examples/strategies/sweep` is built, installed beside the scheduler, and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.local_network import LocalNetwork, local_network
from support.wheelhouse import OVERRIDE, ROOT, Environment, empty_environment, passed, run, uv

from hypha_proto.update_file import TensorFile, open_update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SWEEP = ROOT / "examples" / "strategies" / "sweep"


@contextmanager
def scheduler_with_sweep(wheels: Path, folder: Path) -> Iterator[Environment]:
    """Install the scheduler and the example from their wheels."""
    passed(run([*uv(), "build", "--quiet", "--wheel", "--out-dir", str(folder / "wheel"), str(SWEEP)]))
    [wheel] = (folder / "wheel").glob("hypha_sweep-*.whl")
    with empty_environment(folder / "env", wheels) as environment:
        environment.shell(f"uv pip install --override <(echo '{OVERRIDE}') hypha-scheduler {wheel}")
        yield environment


def run_sweep(network: LocalNetwork, program: Path, strategies: str) -> tuple[int, str, Path]:
    """Run the example's job with a scheduler; return its exit status, its log and its output directory."""
    runs = network.folders.runs / "sweep"
    node, _, _ = network.configuration("scheduler").read_text().partition("output_dir")
    job = (SWEEP / "job.toml").read_text().replace('"start-model"', '"../start-model"')
    job = job.replace("[dataset]", "[scheduler.job.dataset]").replace("[model]", "[scheduler.job.model]")
    job = job.replace("[variants]", "[scheduler.job.variants]")
    text = f'{node}output_dir = "../runs/sweep"\n\n[scheduler]\nstrategies = {strategies}\n\n[scheduler.job]\n{job}'
    network.configuration("sweep").write_text(text)
    command = [str(program), "run", "--config", str(network.configuration("sweep"))]
    child = network.processes.start("sweep", command)
    return child.process.wait(120), child.log.read_text(), runs


def tensors(path: Path) -> dict[str, Any]:
    with TensorFile(path) as file:
        return {name: file.tensor(name).copy() for name in file.tensors}


def test_a_sweep_of_an_installed_wheel_keeps_the_best_of_its_variants(wheels: Path, tmp_path: Path) -> None:
    with scheduler_with_sweep(wheels, tmp_path) as installed, local_network(tmp_path / "net", workers=2) as network:
        program = installed.folder / "bin" / "hypha-scheduler"
        status, log, runs = run_sweep(network, program, '["sweep"]')
        logs = {name: network.log(name) for name in network.trainers}
    assert status == 0, log
    assert "Traceback" not in log
    assert " ERROR " not in log
    [path] = runs.glob("*/result.json")
    check_result(json.loads(path.read_text()), network.folders.start_model, path.parent)
    events = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert (kinds.count("placement"), kinds.count("lease_added"), kinds.count("variant")) == (1, 1, 3)
    exits = [text.count("executor exited with status 0") for text in logs.values()]
    assert sorted(exits) == [1, 2], "three tasks on two leases"
    for text in logs.values():
        assert "Traceback" not in text


def check_result(result: dict[str, Any], start: Path, directory: Path) -> None:
    """Check that the model is the start model and the update of the variant with the lowest loss."""
    assert [variant["name"] for variant in result["variants"]] == ["slow", "middle", "fast"]
    assert [variant["failure"] for variant in result["variants"]] == ["", "", ""]
    best = min(result["variants"], key=lambda variant: float(variant["loss"]))
    assert best["loss"] < max(variant["loss"] for variant in result["variants"])
    assert result["best"] == best["name"]
    assert result["model_dir"] == str(directory / "model")
    before, after = tensors(start / "model.safetensors"), tensors(directory / "model" / "model.safetensors")
    update, about = open_update(directory / "updates" / best["update"])
    with update:
        assert about.samples == 400
        changed = {name for name in after if (before[name] != after[name]).any()}
        assert changed
        for name in changed:
            assert (before[name] + update.tensor(name) == after[name]).all(), name
