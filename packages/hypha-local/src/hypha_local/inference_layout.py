"""Configuration of a network that runs a batch inference job: gateway, data node, workers and scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hypha_local.demo_tasks import CLASSIFY, DemoInference
from hypha_local.network_layout import Folders, NodePlan, process_executor, toml, write_nodes

MODULE: Final = "hypha.accelerate_executor.inference"
"""Module of the executor."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Parameters of the demo's inference job."""

    workers: int = 3
    seed: int = 0
    task: DemoInference = CLASSIFY
    columns: tuple[str, ...] = CLASSIFY.columns
    """Columns of the dataset that the results repeat."""
    delay: float = 0.0
    """Seconds that the executors add to every batch."""

    @property
    def slices(self) -> int:
        """Number of slices of the dataset, if it has as many rows."""
        return self.task.slices_per_worker * self.workers


def write_inference_configuration(
    folders: Folders, nodes: Iterable[NodePlan], inference: Inference, python: str
) -> None:
    """Write the TOML file of every node to the run directory."""
    name = inference.task.dataset
    executor = process_executor("inference", "transformers", python, MODULE, inference.delay)
    write_nodes(folders, nodes, {name: f"../data/{name}"}, lambda _: executor, _job(inference))


def _job(inference: Inference) -> str:
    task = inference.task
    return f"""[scheduler.job]
type = "inference"
dataset = {toml(task.dataset)}

[scheduler.job.model]
path = "../model"
type = {toml(task.trained.type)}

[scheduler.job.inference]
task = {toml(task.kind)}
batch_size = {task.batch_size}
seed = {inference.seed}
{task.settings}
[scheduler.job.results]
columns = {toml(list(inference.columns))}

[scheduler.job.resources]
num_workers = {inference.workers}
worker = {{ cpu = 1.0 }}

[scheduler.job.resources.worker_price]
bid = 100.0
max = 120.0
"""
