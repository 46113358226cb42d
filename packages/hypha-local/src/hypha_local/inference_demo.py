"""Inference demo: trains a model unless one is given, applies it to a dataset on a network of processes, audits.

Like `demo`, with the configuration of `inference_layout` and the results of `inference_summary`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from rich.console import Console

from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.datasets.prompts import write_prompts
from hypha_local.demo import run_demo
from hypha_local.demo_tasks import CLASSIFY, GENERATE
from hypha_local.display import Display
from hypha_local.errors import ModelUnusableError, ProcessFailedError, RunDirectoryError
from hypha_local.inference_layout import MODULE, Inference, write_inference_configuration
from hypha_local.inference_summary import InferenceSummary, summarize_inference
from hypha_local.job_run import STEP_TIMEOUT, JobRun, Victim, audit_job, job_directory
from hypha_local.network_layout import DemoTraining, Folders, NodePlan, plan_nodes
from hypha_local.nodes import start_network
from hypha_local.processes import LocalProcess, Processes, local_processes, script
from hypha_proto.codec import parse_json
from hypha_proto.record_file import EVENTS

KILL_DELAY: Final = 0.25
"""Seconds that executors add to each batch with `--kill`; without it the job could be over before."""


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """What the user asks for, beside the job."""

    model: Path | None
    """Directory of a model; None trains one first."""
    rounds: int
    """Rounds of that training."""
    prompts: Path | None
    """JSON lines with the key ``prompt``; None for prompts out of the standard library."""
    kill: Victim | None
    keep: bool
    timeout: float
    """Seconds for the training, and for the inference."""


async def run_inference(
    folders: Folders, inference: Inference, options: InferenceOptions, console: Console
) -> InferenceSummary:
    """Apply a model to the task's dataset on a network in `folders` and return a summary.

    Raises:
        RunDirectoryError: the folder cannot be used.
        ModelUnusableError: the model cannot do this task.
        ProcessFailedError: a program failed; the message ends with its last lines.
    """
    display = Display(console, 0)
    _check_places(folders, options)
    await anyio.to_thread.run_sync(folders.make)
    await _provide_model(folders, inference, options, display)
    nodes = plan_nodes(inference.workers, parameter_server=False)
    write_inference_configuration(folders, nodes, inference, sys.executable)
    async with local_processes(folders.logs) as processes:
        rows = 0

        async def make_data() -> None:
            nonlocal rows
            rows = await _make_data(processes, folders, inference, options)

        await start_network(processes, folders, nodes, display, make_data)
        display.step(f"dataset {inference.task.dataset} served: {rows} rows")
        with anyio.move_on_after(options.timeout) as scope:
            await _job_run(processes, folders, nodes, options.kill, display).run()
        if scope.cancelled_caught:
            raise ProcessFailedError(f"inference was not done within {options.timeout:g} s; see {folders.logs}")
        await audit_job(processes, folders)
        await processes.stop()
        display.step("results audited, every process ended")
    summary = _summarize(folders, inference, options, display)
    if not options.keep:
        folders.tidy(keep_runs=True)
    return summary


def _check_places(folders: Folders, options: InferenceOptions) -> None:
    """Check that the run directory, which is replaced, does not contain what the user names."""
    for option, path in (("--model", options.model), ("--prompts", options.prompts)):
        if path is not None and path.is_relative_to(folders.root):
            raise RunDirectoryError(
                f"{option} {path}: the run directory {folders.root} is replaced; name another --dir"
            )
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ModelUnusableError(f"--model {options.model}: there is no config.json; name a model's directory")


async def _provide_model(folders: Folders, inference: Inference, options: InferenceOptions, display: Display) -> None:
    """Copy the given model to the run directory, or train one on a network of its own first."""
    model = options.model
    if model is None:
        task = inference.task.trained
        training = DemoTraining(inference.workers, options.rounds, inference.seed, task, task.evaluate_every)
        display.step(f"training a model first: {options.rounds} rounds of the task {task.name}")
        own = Folders(folders.root / "training")
        await run_demo(
            own, training, keep=False, console=display.console, timeout=options.timeout, started=display.started
        )
        model = own.model
    shutil.copytree(model, folders.model)
    if inference.task is GENERATE and add_byte_tokenizer(folders.model):
        display.step("the model's tokens are bytes: tokenizer added")


async def _make_data(processes: Processes, folders: Folders, inference: Inference, options: InferenceOptions) -> int:
    """Prepare the dataset; return the number of its rows."""
    task = inference.task
    if task is CLASSIFY:
        source = folders.test_set
        _, rows = await anyio.to_thread.run_sync(task.trained.write, folders.data / "train.safetensors", source)
    elif options.prompts is None:
        source = folders.root / "prompts.jsonl"
        rows = await anyio.to_thread.run_sync(write_prompts, source)
    else:
        source = Path(shutil.copyfile(options.prompts, folders.root / "prompts.jsonl"))
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


def _summarize(folders: Folders, inference: Inference, options: InferenceOptions, display: Display) -> InferenceSummary:
    directory = job_directory(folders)
    result: dict[str, Any] = parse_json((directory / "result.json").read_text())
    wall = time.monotonic() - display.started
    task, audit = inference.task.name, folders.audit.read_text().strip()
    summary = summarize_inference(result, task=task, wall_seconds=wall, killed=options.kill, audit=audit)
    shutil.copyfile(directory / EVENTS, folders.metrics)
    (folders.root / "summary.json").write_text(summary.as_json() + "\n")
    return summary
