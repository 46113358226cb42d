"""A strategy in a wheel of its own: `examples/strategies/sweep` is built, installed beside the scheduler, and run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.local_network import Job, LocalNetwork, local_network, trainer
from support.waiting import wait_until
from support.wheelhouse import OVERRIDE, ROOT, Environment, empty_environment, passed, run, uv

from hypha_proto.update_file import TensorFile, open_update

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SWEEP = ROOT / "examples" / "strategies" / "sweep"
ONLY = "only-worker-1"
"""Executor that one of the two workers has."""
SLOW = "slow-trainer"
"""Executor that both have, and that takes a while."""


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
    folder, slow = tmp_path_factory.mktemp("network"), trainer(SLOW, 0.2) + "\n" + chooser
    with local_network(folder, workers=2, worker_1=trainer(ONLY, 0.0) + slow, worker_2=slow) as network:
        yield network


def configuration(network: LocalNetwork, name: str, job: str, strategies: str = '["sweep"]') -> Path:
    """Write the configuration of a scheduler with a job, given as the content of a job file."""
    node, _, _ = network.configuration("scheduler").read_text().partition("output_dir")
    for table in ("dataset", "model", "variants"):
        job = job.replace(f"[{table}]", f"[scheduler.job.{table}]")
    head = f'{node}output_dir = "../runs/{name}"\n\n[scheduler]\nstrategies = {strategies}\n\n[scheduler.job]\n'
    path = network.configuration(name)
    path.write_text(head + job)
    return path


def example_job(**changes: str) -> str:
    """Return the example's job, with some of its lines changed."""
    job = (SWEEP / "job.toml").read_text().replace('"start-model"', '"../start-model"')
    for old, new in changes.items():
        line = next(line for line in job.splitlines() if line.startswith(f"{old} = "))
        job = job.replace(f"{line}\n", new, 1)
    return job


@dataclass
class Finished:
    """A job that has finished: its directory, result and events, and the log of its scheduler."""

    directory: Path
    log: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def run_sweep(network: LocalNetwork, installed: Environment, name: str, job: str) -> Finished:
    """Run a job with the installed scheduler."""
    return finished(start_sweep(network, installed, name, job))


def start_sweep(network: LocalNetwork, installed: Environment, name: str, job: str) -> Job:
    """Start the installed scheduler with a job."""
    command = [str(installed.folder / "bin" / "hypha-scheduler"), "run", "--config"]
    child = network.processes.start(name, [*command, str(configuration(network, name, job))])
    return Job(child, network.folders.runs / name)


def finished(job: Job) -> Finished:
    """Wait until a job has finished without errors."""
    status, log = job.wait(120), job.log
    assert status == 0, log
    assert "Traceback" not in log
    assert " ERROR " not in log
    [path] = job.runs.glob("*/result.json")
    return Finished(path.parent, log)


def exits(network: LocalNetwork) -> list[int]:
    """Return how many executors of each worker have exited with status 0."""
    logs = [network.log(name) for name in network.trainers]
    assert not any("Traceback" in log for log in logs)
    return [log.count("executor exited with status 0") for log in logs]


def tensors(path: Path) -> dict[str, Any]:
    with TensorFile(path) as file:
        return {name: file.tensor(name).copy() for name in file.tensors}


def test_a_sweep_keeps_the_best_of_three_variants_on_two_leases(network: LocalNetwork, installed: Environment) -> None:
    before = exits(network)
    job = run_sweep(network, installed, "sweep", example_job())
    result = job.result
    assert [variant["name"] for variant in result["variants"]] == ["slow", "middle", "fast"]
    assert [variant["failure"] for variant in result["variants"]] == ["", "", ""]
    assert [len(job.events(kind)) for kind in ("placement", "lease_added", "variant")] == [1, 2, 3]
    [chosen] = job.events("task_ended")[-1:]
    assert (chosen["task"], chosen["outcome"]) == ("best.variant", "finished")
    done = [after - ended for after, ended in zip(exits(network), before, strict=True)]
    assert sum(done) == 4, "three variants and the choice"
    assert min(done) >= 1
    check_model(result, network.folders.start_model, job.directory)


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


def test_two_variants_train_side_by_side_on_one_worker(network: LocalNetwork, installed: Environment) -> None:
    before = exits(network)
    requirement = f'worker = {{ cpu = 0.5, storage = 0.1, kind = "{ONLY}" }}\n'
    job = run_sweep(network, installed, "one-worker", example_job(worker=requirement, fast=""))
    workers = [worker["peer"] for event in job.events("placement") for worker in event["workers"]]
    workers += [event["peer"] for event in job.events("lease_added")]
    assert workers[:2] == [network.peer_id("worker-1")] * 2
    assert len(workers) == 3, "and a lease for the choice"
    assert [variant["failure"] for variant in job.result["variants"]] == ["", ""]
    assert sum(exits(network)) - sum(before) == 3
    check_model(job.result, network.folders.start_model, job.directory)


def test_a_variant_of_a_lost_worker_is_trained_by_another(network: LocalNetwork, installed: Environment) -> None:
    requirement = f'worker = {{ cpu = 1, kind = "{SLOW}" }}\n'
    job = start_sweep(network, installed, "lost", example_job(worker=requirement, fast=""))
    wait_until(lambda: bool(job.events("lease_added")), 60, "two leases")
    lost = job.events("placement")[0]["workers"][0]["peer"]
    [name] = [name for name in network.trainers if network.peer_id(name) == lost]
    network.kill(name)
    try:
        result = finished(job).result
    finally:
        network.revive()
    assert [variant["failure"] for variant in result["variants"]] == ["", ""]
    assert sorted(variant["update"] for variant in result["variants"]) == ["middle-0.safetensors", "slow-1.safetensors"]


def test_a_sweep_that_was_interrupted_is_resumed(network: LocalNetwork, installed: Environment) -> None:
    requirement = f'worker = {{ cpu = 1, kind = "{SLOW}" }}\n'
    job = start_sweep(network, installed, "resumed", example_job(worker=requirement, workers="", fast=""))
    wait_until(lambda: bool(job.events("variant")), 60, "a variant")
    network.kill("resumed")
    [journal] = job.runs.glob("*/journal.jsonl")
    program = [str(installed.folder / "bin" / "hypha-scheduler"), "resume", str(journal.parent), "--config"]
    done = run([*program, str(network.configuration("resumed"))], env=installed.variables(), timeout=120)
    assert done.returncode == 0, done.stderr
    result = Finished(journal.parent, done.stderr).result
    assert [variant["failure"] for variant in result["variants"]] == ["", ""]
    assert len(job.events("variant")) == 2, "each variant was trained once"
    check_model(result, network.folders.start_model, journal.parent)


@pytest.mark.parametrize(
    ("strategies", "changes", "error"),
    [
        ('["diloco"]', {}, "strategy 'sweep' is installed, but scheduler.strategies does not list it"),
        (
            '["sweep"]',
            {"type": 'type = "swep"\n'},
            "no strategy 'swep' is installed; known: sweep; did you mean 'sweep'?",
        ),
        ('["sweep", "diloco"]', {"samples": "seed = 1\n"}, 'this key belongs to jobs of type = "diloco"'),
    ],
    ids=["not listed", "unknown type", "key of another type"],
)
def test_errors_in_a_job_name_the_strategies(
    network: LocalNetwork, installed: Environment, strategies: str, changes: dict[str, str], error: str
) -> None:
    path = configuration(network, "checked", example_job(**changes), strategies)
    program = installed.folder / "bin" / "hypha-scheduler"
    done = run([str(program), "run", "--check", "--config", str(path)], env=installed.variables())
    assert (done.returncode, error in done.stderr) == (2, True), done.stderr
