"""Demo run: starts a network of processes on this machine, trains a model, collects the results, stops everything.

Uses `network_layout` and `certificates` for the files, `processes` and `probe` to start nodes and wait until they are
healthy, `executor_session` to create and evaluate the model, `display` to show the scheduler's events, and `summary`
and `plot` for the results.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import anyio
import anyio.to_thread
from rich.console import Console

from hypha_local.display import Display
from hypha_local.executor_session import ExecutorSession
from hypha_local.job_run import REPLACED, STEP_TIMEOUT, JobRun, Victim, audit_job
from hypha_local.network_layout import HELD_OUT, DemoTraining, Folders, NodePlan, plan_nodes, write_configuration
from hypha_local.nodes import start_network, start_node
from hypha_local.plot import plot_loss
from hypha_local.processes import LocalProcess, Processes, local_processes, script
from hypha_local.summary import Summary, summarize
from hypha_proto.codec import parse_json
from hypha_proto.record_file import EVENTS

KILL_DELAY: Final = 0.1
"""Seconds that workers add to each batch where one of them is killed."""
SLICES_PER_WORKER: Final = 4


async def run_demo(
    folders: Folders,
    training: DemoTraining,
    *,
    keep: bool,
    console: Console,
    timeout: float,
    compare: bool = False,
    kill: Victim | None = None,
    started: float | None = None,
) -> Summary:
    """Train the task's model on a network in `folders` and return a summary.

    Args:
        folders: the run directory.
        training: what to train.
        keep: keep certificates, configuration, slices and work directories.
        console: terminal for the progress.
        timeout: seconds for the training itself.
        compare: afterwards train once more for each worker, alone on its shard of the data.
        kill: what is killed when 40 % of the rounds are done.
        started: `time.monotonic` when the command started, if other steps came before.

    Raises:
        RunDirectoryError: the folder cannot be used.
        ProcessFailedError: a program failed; the message ends with its last lines.
    """
    display = Display(console, training.rounds, time.monotonic() if started is None else started)
    await anyio.to_thread.run_sync(folders.make)
    if kill == "worker":  # else the job could be over before another one has joined
        training = replace(training, delay=KILL_DELAY)
    nodes = plan_nodes(training.workers, spare=kill in REPLACED)
    write_configuration(folders, nodes, training, sys.executable)
    async with local_processes(folders.logs) as processes:
        session = ExecutorSession(processes, folders.logs)

        async def prepare() -> None:
            display.step(f"certificates for {len(nodes)} nodes in {folders.root}")
            await make_data(processes, folders, training)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make_model, session, folders, training)
            await start_network(processes, folders, nodes, display, prepare)
        display.step("start model and dataset made")
        changes = await _train(processes, folders, nodes, training, kill, display, timeout)
        summary = await _collect_results(processes, session, folders, nodes, training, display)
        summary = replace(summary, killed=kill, changes=changes)
        _write_summary(folders, summary)
        if compare:
            summary = replace(
                summary, alone_losses=await _train_separately(processes, folders, training, display, timeout)
            )
            _write_summary(folders, summary)
    drawn = await anyio.to_thread.run_sync(plot_loss, folders.metrics, summary, folders.root / "loss.png")
    display.step(drawn)
    if not keep:
        folders.tidy()
    return summary


def _write_summary(folders: Folders, summary: Summary) -> None:
    (folders.root / "summary.json").write_text(summary.as_json() + "\n")


async def make_model(session: ExecutorSession, folders: Folders, training: DemoTraining) -> None:
    """Write the start model of the task."""
    command = ["create-model", "--arch", training.task.arch, "--task", training.task.wire]
    command += ["--seed", str(training.seed), "--out", str(folders.start_model)]
    await session.run(command, timeout=STEP_TIMEOUT)


async def make_data(processes: Processes, folders: Folders, training: DemoTraining) -> None:
    """Write the task's samples and prepare its datasets."""
    source = folders.data / "train.safetensors"
    await anyio.to_thread.run_sync(training.task.write, source, folders.test_set)
    command = [script("hypha-data"), "prepare", str(source), "--out", str(folders.data / training.task.name)]
    command += ["--slices", str(SLICES_PER_WORKER * training.workers), "--seed", str(training.seed)]
    await processes.run("prepare", command, timeout=STEP_TIMEOUT)
    if training.evaluate_every:
        held_out = ["--out", str(folders.data / HELD_OUT), "--slices", str(training.workers)]
        command = [script("hypha-data"), "prepare", str(folders.test_set), *held_out]
        await processes.run("prepare-held-out", command, timeout=STEP_TIMEOUT)


async def _train(
    processes: Processes,
    folders: Folders,
    nodes: Sequence[NodePlan],
    training: DemoTraining,
    kill: Victim | None,
    display: Display,
    timeout: float,
) -> tuple[str, ...]:
    """Run the job to its end; return how its members have changed after something was killed."""

    def start_again() -> LocalProcess:
        display.step("scheduler started again: it takes the job up")
        return start_node(processes, folders, nodes[-1])

    executor = "hypha.accelerate_executor.training"
    job = JobRun(processes, folders, nodes, executor, kill, start_again, display)
    with anyio.move_on_after(timeout) as scope:
        await job.run()
    if scope.cancelled_caught:
        raise processes.child(nodes[-1].name).failure(f"training was not done within {timeout:g} s")
    return tuple(job.changes)


async def _collect_results(
    processes: Processes,
    session: ExecutorSession,
    folders: Folders,
    nodes: Sequence[NodePlan],
    training: DemoTraining,
    display: Display,
) -> Summary:
    """Copy and evaluate the trained model, and audit the job and stop the network meanwhile."""
    [result_path] = folders.runs.glob("*/result.json")
    shutil.copytree(result_path.parent / "model", folders.model)
    shutil.copyfile(result_path.parent / EVENTS, folders.metrics)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(processes.stop, [node.name for node in nodes])
        tasks.start_soon(audit_job, processes, folders)
        # in the process that has created the start model
        command = ["evaluate", "--model", str(folders.model), "--data", str(folders.test_set)]
        evaluated = await session.run([*command, "--task", training.task.wire], timeout=STEP_TIMEOUT)
    (folders.root / "evaluation.json").write_text(evaluated)
    evaluation: dict[str, Any] = parse_json(evaluated)
    result: dict[str, Any] = parse_json(result_path.read_text())
    wall = time.monotonic() - display.started
    summary = summarize(
        result, evaluation, seed=training.seed, wall_seconds=wall, model_dir=folders.model, names=display.names
    )
    summary = replace(summary, task=training.task.name, audit=folders.audit.read_text().strip())
    display.step("model evaluated, job audited, every process ended")
    return summary


async def _train_separately(
    processes: Processes, folders: Folders, training: DemoTraining, display: Display, timeout: float
) -> tuple[float, ...]:
    """Return the test loss of each worker when it trains alone.

    Worker i of n gets the slices i, i + n, …, starts from the job's start model and takes as many steps as a worker of
    the job took on average, with the same batch size and learning rate.
    """
    losses: dict[int, float] = {}

    async def one(index: int) -> None:
        losses[index] = await _train_one_separately(processes, folders, training, index, timeout)
        display.step(f"worker {index + 1} alone on its shard: test loss {losses[index]:.4f}")

    async with anyio.create_task_group() as tasks:
        for index in range(training.workers):
            tasks.start_soon(one, index)
    return tuple(losses[index] for index in range(training.workers))


async def _train_one_separately(
    processes: Processes, folders: Folders, training: DemoTraining, index: int, timeout: float
) -> float:
    task, name = training.task, f"alone-{index + 1}"
    model, output = folders.work / name, folders.work / f"{name}.json"
    shard = sorted((folders.data / task.name).glob("*.safetensors"))[index :: training.workers]
    executor = script("hypha-accelerate-executor")
    command = [executor, "train-alone", "--task", task.wire, "--model", str(folders.start_model), "--out", str(model)]
    command += ["--steps", str(training.steps_a_worker), "--batch-size", str(task.batch_size), "--threads", "1"]
    command += ["--learning-rate", str(task.learning_rate), "--seed", str(training.seed), *map(str, shard)]
    await processes.run(name, command, timeout=timeout)
    command = [executor, "evaluate", "--task", task.wire, "--model", str(model), "--data", str(folders.test_set)]
    await processes.run(f"{name}-evaluate", command, timeout=STEP_TIMEOUT, stdout=output)
    return float(parse_json(output.read_text())["loss"])
