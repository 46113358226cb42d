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
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
import anyio.to_thread

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


@dataclass(slots=True)
class TrainingDemo:
    """Trains the task's model on a network in `folders`."""

    folders: Folders
    """The run directory."""
    training: DemoTraining
    display: Display
    timeout: float
    """Seconds for the training itself."""
    keep: bool = False
    """Whether certificates, configuration, slices and work directories stay."""
    compare: bool = False
    """Whether it trains once more for each worker afterwards, alone on its shard of the data."""
    kill: Victim | None = None
    """What is killed when 40 % of the rounds are done."""
    _processes: Processes = field(init=False)
    _session: ExecutorSession = field(init=False)
    _nodes: Sequence[NodePlan] = field(init=False)

    async def run(self) -> Summary:
        """Train the model and return a summary.

        Raises:
            RunDirectoryError: the folder cannot be used.
            ProcessFailedError: a program failed; the message ends with its last lines.
        """
        folders, kill = self.folders, self.kill
        await anyio.to_thread.run_sync(folders.make)
        if kill == "worker":  # else the job could be over before another one has joined
            self.training = replace(self.training, delay=KILL_DELAY)
        self._nodes = plan_nodes(self.training.workers, spare=kill in REPLACED)
        write_configuration(folders, self._nodes, self.training, sys.executable)
        async with local_processes(folders.logs) as self._processes:
            self._session = ExecutorSession(self._processes)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(make_model, self._session, folders, self.training)
                await start_network(self._processes, folders, self._nodes, self.display, self._prepare)
            self.display.step("start model and dataset made")
            changes = await self._train()
            summary = replace(await self._collect_results(), killed=kill, changes=changes)
            self._write(summary)
            if self.compare:
                summary = replace(summary, alone_losses=await self._train_separately())
                self._write(summary)
        drawn = await anyio.to_thread.run_sync(plot_loss, folders.metrics, summary, folders.root / "loss.png")
        self.display.step(drawn)
        if not self.keep:
            folders.tidy()
        return summary

    def _write(self, summary: Summary) -> None:
        (self.folders.root / "summary.json").write_text(summary.as_json() + "\n")

    async def _prepare(self) -> None:
        self.display.step(f"certificates for {len(self._nodes)} nodes in {self.folders.root}")
        await make_data(self._processes, self.folders, self.training)

    async def _train(self) -> tuple[str, ...]:
        """Run the job to its end; return how its members have changed after something was killed."""

        def start_again() -> LocalProcess:
            self.display.step("scheduler started again: it takes the job up")
            return start_node(self._processes, self.folders, self._nodes[-1])

        executor = "hypha.accelerate_executor.training"
        job = JobRun(self._processes, self.folders, self._nodes, executor, self.kill, start_again, self.display)
        with anyio.move_on_after(self.timeout) as scope:
            await job.run()
        if scope.cancelled_caught:
            scheduler = self._processes.child(self._nodes[-1].name)
            raise scheduler.failure(f"training was not done within {self.timeout:g} s")
        return tuple(job.changes)

    async def _collect_results(self) -> Summary:
        """Copy and evaluate the trained model, and audit the job and stop the network meanwhile."""
        folders, task = self.folders, self.training.task
        [result_path] = folders.runs.glob("*/result.json")
        shutil.copytree(result_path.parent / "model", folders.model)
        shutil.copyfile(result_path.parent / EVENTS, folders.metrics)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._processes.stop, [node.name for node in self._nodes])
            tasks.start_soon(audit_job, self._processes, folders)
            # in the process that has created the start model
            command = ["evaluate", "--model", str(folders.model), "--data", str(folders.test_set), "--task", task.wire]
            evaluated = await self._session.run(command, timeout=STEP_TIMEOUT)
        (folders.root / "evaluation.json").write_text(evaluated)
        summary = summarize(
            parse_json(result_path.read_text()),
            parse_json(evaluated),
            seed=self.training.seed,
            wall_seconds=time.monotonic() - self.display.started,
            model_dir=folders.model,
            names=self.display.names,
        )
        self.display.step("model evaluated, job audited, every process ended")
        return replace(summary, task=task.name, audit=folders.audit.read_text().strip())

    async def _train_separately(self) -> tuple[float, ...]:
        """Return the test loss of each worker when it trains alone.

        Worker i of n gets the slices i, i + n, …, starts from the job's start model and takes as many steps as a worker
        of the job took on average, with the same batch size and learning rate.
        """
        losses: dict[int, float] = {}

        async def one(index: int) -> None:
            losses[index] = await self._train_one_separately(index)
            self.display.step(f"worker {index + 1} alone on its shard: test loss {losses[index]:.4f}")

        async with anyio.create_task_group() as tasks:
            for index in range(self.training.workers):
                tasks.start_soon(one, index)
        return tuple(losses[index] for index in range(self.training.workers))

    async def _train_one_separately(self, index: int) -> float:
        folders, training, task, name = self.folders, self.training, self.training.task, f"alone-{index + 1}"
        model, output = folders.work / name, folders.work / f"{name}.json"
        shard = sorted((folders.data / task.name).glob("*.safetensors"))[index :: training.workers]
        executor = script("hypha-accelerate-executor")
        command = [executor, "train-alone", "--task", task.wire, "--model", str(folders.start_model)]
        command += ["--out", str(model), "--steps", str(training.steps_a_worker)]
        command += ["--batch-size", str(task.batch_size), "--threads", "1"]
        command += ["--learning-rate", str(task.learning_rate), "--seed", str(training.seed), *map(str, shard)]
        await self._processes.run(name, command, timeout=self.timeout)
        command = [executor, "evaluate", "--task", task.wire, "--model", str(model), "--data", str(folders.test_set)]
        await self._processes.run(f"{name}-evaluate", command, timeout=STEP_TIMEOUT, stdout=output)
        return float(parse_json(output.read_text())["loss"])
