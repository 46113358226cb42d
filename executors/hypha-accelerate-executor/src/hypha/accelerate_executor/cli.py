"""The command `hypha-accelerate-executor`: create a start model, train on local files, evaluate a trained model.

Training for a job is `python -m hypha.accelerate_executor.training`, which a worker starts.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from hypha.accelerate_executor.errors import ExecutorError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-accelerate-executor")
@click.option("--no-color", is_flag=True, expose_value=False, help="Never print colours.")
def main() -> None:
    """Models for Hypha jobs: create one to start from, evaluate the trained one."""


@main.command("create-model")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--arch", help="A configuration known by name: resnet-digits, llama-bytes.")
@click.option("--config-json", type=click.Path(path_type=Path, dir_okay=False), help="A model's config.json.")
@click.option("--torch-class", metavar="MODULE:CLASS", help="A class of your own, for task torch.")
@click.option("--kwargs", default="{}", metavar="JSON", help="Keyword arguments of the class.  [default: {}]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides the weights.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to make.")
def create(
    task: str,
    arch: str | None,
    config_json: Path | None,
    torch_class: str | None,
    kwargs: str,
    seed: int,
    out: Path,
) -> None:
    """Write a model directory with random weights."""
    from hypha.accelerate_executor.modeling.create import create_model, create_torch_model, read_config

    try:
        if torch_class is not None:
            parameters = create_torch_model(torch_class, kwargs, seed, out)
        else:
            parameters = create_model(task, read_config(arch, config_json), seed, out)
    except ExecutorError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {parameters} parameters")


@main.command("train-alone")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model directory.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to make.")
@click.option("--steps", type=click.IntRange(1), required=True, help="Batches to train on.")
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Samples of a batch.")
@click.option(
    "--learning-rate", type=click.FloatRange(0, min_open=True), default=1e-3, show_default=True, help="AdamW."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides the order of samples.")
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with; with one the result is exact.")
@click.argument("slices", type=click.Path(path_type=Path, dir_okay=False, exists=True), nargs=-1, required=True)
def alone(
    task: str,
    model: Path,
    out: Path,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    threads: int | None,
    slices: tuple[Path, ...],
) -> None:
    """Train on SLICES without a network: the baseline that one worker reaches alone."""
    import torch

    from hypha.accelerate_executor.local_training import train_locally

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        loss = train_locally(
            task, model, slices, out, learning_rate=learning_rate, batch_size=batch_size, steps=steps, seed=seed
        )
    except (ExecutorError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps({"loss": loss, "steps": steps}))


@main.command("evaluate")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model directory.")
@click.option("--data", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Safetensors file.")
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Samples computed at once.")
@click.option("--allow-module", multiple=True, metavar="NAME", help="A module whose classes task torch may use.")
def measure(task: str, model: Path, data: Path, batch_size: int, allow_module: tuple[str, ...]) -> None:
    """Print accuracy and loss of a model on a file of samples, as one JSON line."""
    from hypha.accelerate_executor.modeling.evaluation import evaluate

    try:
        result = evaluate(task, model, data, batch_size, allow_module)
    except (ExecutorError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(dataclasses.asdict(result)))
