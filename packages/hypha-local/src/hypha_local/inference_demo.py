"""Inference demo: trains a model unless one is given, applies it to a dataset on a network of processes, audits.

Like `demo`, with the results of `inference_summary`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from rich.console import Console

from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.datasets.prompts import write_prompts
from hypha_local.demo import TrainingDemo
from hypha_local.demo_tasks import CLASSIFY, GENERATE, DemoInference
from hypha_local.display import Display
from hypha_local.errors import ModelUnusableError, ProcessFailedError, RunDirectoryError
from hypha_local.inference_summary import InferenceSummary, summarize_inference
from hypha_local.job_run import STEP_TIMEOUT, JobRun, Victim, audit_job, job_directory
from hypha_local.network_layout import (
    DemoTraining,
    Folders,
    NodePlan,
    plan_nodes,
    process_executor,
    toml,
    write_nodes,
)
from hypha_local.nodes import start_network
from hypha_local.processes import LocalProcess, Processes, local_processes, script
from hypha_proto.codec import parse_json
from hypha_proto.record_file import EVENTS

MODULE: Final = "hypha.accelerate_executor.inference"
"""Module of the executor."""
KILL_DELAY: Final = 0.25
"""Seconds that executors add to each batch with `--kill`; without it the job could be over before."""


@dataclass(frozen=True, slots=True)
class Inference:
    """What the user asks for."""

    workers: int = 3
    seed: int = 0
    task: DemoInference = CLASSIFY
    model: Path | None = None
    """Directory of a model; None trains one first."""
    rounds: int = CLASSIFY.trained.rounds
    """Rounds of that training."""
    prompts: Path | None = None
    """JSON lines with the key ``prompt``; None for prompts out of the standard library."""
    kill: Victim | None = None
    keep: bool = False
    timeout: float = 900.0
    """Seconds for the training, and for the inference."""

    @property
    def slices(self) -> int:
        """Number of slices of the dataset, if it has as many rows."""
        return self.task.slices_per_worker * self.workers


async def run_inference(folders: Folders, inference: Inference, console: Console) -> InferenceSummary:
    """Apply a model to the task's dataset on a network in `folders` and return a summary.

    Raises:
        RunDirectoryError: the folder cannot be used.
        ModelUnusableError: the model cannot do this task.
        ProcessFailedError: a program failed; the message ends with its last lines.
    """
    display = Display(console, 0)
    _check_places(folders, inference)
    await anyio.to_thread.run_sync(folders.make)
    await _provide_model(folders, inference, display)
    nodes = plan_nodes(inference.workers, parameter_server=False)
    write_inference_configuration(folders, nodes, inference, sys.executable)
    async with local_processes(folders.logs) as processes:
        rows = 0

        async def make_data() -> None:
            nonlocal rows
            rows = await _make_data(processes, folders, inference)

        await start_network(processes, folders, nodes, display, make_data)
        display.step(f"dataset {inference.task.dataset} served: {rows} rows")
        with anyio.move_on_after(inference.timeout) as scope:
            await _job_run(processes, folders, nodes, inference.kill, display).run()
        if scope.cancelled_caught:
            raise ProcessFailedError(f"inference was not done within {inference.timeout:g} s; see {folders.logs}")
        await audit_job(processes, folders)
        await processes.stop()
        display.step("results audited, every process ended")
    summary = _summarize(folders, inference, display)
    if not inference.keep:
        folders.tidy(keep_runs=True)
    return summary


def _check_places(folders: Folders, inference: Inference) -> None:
    """Check that the run directory, which is replaced, does not contain what the user names."""
    for option, path in (("--model", inference.model), ("--prompts", inference.prompts)):
        if path is not None and path.is_relative_to(folders.root):
            raise RunDirectoryError(
                f"{option} {path}: the run directory {folders.root} is replaced; name another --dir"
            )
    if inference.model is not None and not (inference.model / "config.json").is_file():
        raise ModelUnusableError(f"--model {inference.model}: there is no config.json; name a model's directory")


async def _provide_model(folders: Folders, inference: Inference, display: Display) -> None:
    """Copy the given model to the run directory, or train one on a network of its own first."""
    model = inference.model
    if model is None:
        task = inference.task.trained
        training = DemoTraining(inference.workers, inference.rounds, inference.seed, task, task.evaluate_every)
        display.step(f"training a model first: {inference.rounds} rounds of the task {task.name}")
        own = Folders(folders.root / "training")
        shown = Display(display.console, training.rounds, display.started)
        await TrainingDemo(own, training, shown, inference.timeout).run()
        model = own.model
    shutil.copytree(model, folders.model)
    if inference.task is GENERATE and add_byte_tokenizer(folders.model):
        display.step("the model's tokens are bytes: tokenizer added")


async def _make_data(processes: Processes, folders: Folders, inference: Inference) -> int:
    """Prepare the dataset; return the number of its rows."""
    task = inference.task
    if task is CLASSIFY:
        source = folders.test_set
        _, rows = await anyio.to_thread.run_sync(task.trained.write, folders.data / "train.safetensors", source)
    elif inference.prompts is None:
        source = folders.root / "prompts.jsonl"
        rows = await anyio.to_thread.run_sync(write_prompts, source)
    else:
        source = Path(shutil.copyfile(inference.prompts, folders.root / "prompts.jsonl"))
        rows = source.read_bytes().count(b"\n")
    command = [script("hypha-data"), "prepare", str(source), "--out", str(folders.data / task.dataset)]
    command += ["--slices", str(min(inference.slices, max(1, rows))), "--seed", str(inference.seed)]
    await processes.run("prepare", command, timeout=STEP_TIMEOUT)
    return rows


def _job_run(
    processes: Processes, folders: Folders, nodes: Sequence[NodePlan], kill: Victim | None, display: Display
) -> JobRun:
    def resume() -> LocalProcess:
        """Continue the job with a new scheduler."""
        directory = job_directory(folders)
        config = folders.configuration / "scheduler.toml"
        command = [script("hypha-scheduler"), "resume", str(directory), "--config", str(config)]
        display.step(f"hypha-scheduler resume {directory}")
        return processes.start("resume", command)

    return JobRun(processes, folders, nodes, MODULE, kill, resume, display)


def _summarize(folders: Folders, inference: Inference, display: Display) -> InferenceSummary:
    directory = job_directory(folders)
    result: dict[str, Any] = parse_json((directory / "result.json").read_text())
    wall = time.monotonic() - display.started
    task, audit = inference.task.name, folders.audit.read_text().strip()
    summary = summarize_inference(result, task=task, wall_seconds=wall, killed=inference.kill, audit=audit)
    shutil.copyfile(directory / EVENTS, folders.metrics)
    (folders.root / "summary.json").write_text(summary.as_json() + "\n")
    return summary


def write_inference_configuration(
    folders: Folders, nodes: Iterable[NodePlan], inference: Inference, python: str
) -> None:
    """Write the TOML file of every node to the run directory."""
    name = inference.task.dataset
    executor = process_executor("inference", "transformers", python, MODULE, KILL_DELAY if inference.kill else 0.0)
    write_nodes(folders, nodes, {name: f"../data/{name}"}, lambda _: executor, _job(inference))


def _job(inference: Inference) -> str:
    task = inference.task
    return f"""[scheduler.job]
type = "inference"
dataset = {toml(task.dataset)}
model = {{ path = "../model", type = {toml(task.trained.type)} }}
results = {{ columns = {toml([] if inference.prompts else list(task.columns))} }}

[scheduler.job.inference]
task = {toml(task.kind)}
batch_size = {task.batch_size}
seed = {inference.seed}
{task.settings}
[scheduler.job.resources]
num_workers = {inference.workers}
worker = {{ cpu = 1.0 }}
worker_price = {{ bid = 100.0, max = 120.0 }}
"""
