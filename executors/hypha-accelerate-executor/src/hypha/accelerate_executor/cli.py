"""The command `hypha-accelerate-executor`: create a start model, train on local files, evaluate a trained model.

Training for a job is `python -m hypha.accelerate_executor.training`, which a worker starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from hypha.accelerate_executor.errors import ExecutorError
from hypha.accelerate_executor.exit_codes import describe
from hypha_proto.codec import parse_json
from hypha_proto.errors import ProtoError
from hypha_proto.texts import quote


class _Unforeseen(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Commands of which each failure is one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that a context names."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except (ExecutorError, ProtoError, OSError) as error:
            raise click.ClickException(str(error)) from error
        except Exception as error:
            raise _Unforeseen(describe(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-accelerate-executor")
@click.option("--no-color", is_flag=True, expose_value=False, help="Never print colours.")
def main() -> None:
    """Models for Hypha jobs: create one to start from, evaluate the trained one."""


@main.command("create-model")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--arch", help="A configuration known by name: resnet-digits, llama-bytes.")
@click.option("--config-json", type=click.Path(path_type=Path, dir_okay=False), help="A model's config.json.")
@click.option("--from", "pretrained", metavar="DIR|REPO", help="A trained model, which gets a new head for the task.")
@click.option("--labels", type=click.IntRange(1), help="With --from: number of classes of the new head.")
@click.option("--torch-class", metavar="MODULE:CLASS", help="A class of your own, for task torch.")
@click.option("--kwargs", default="{}", metavar="JSON", help="Keyword arguments of the class.  [default: {}]")
@click.option(
    "--allow-module", multiple=True, metavar="NAME", help="A module whose classes a config.json of task torch may name."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides the weights.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Directory to make.")
def create(
    task: str,
    arch: str | None,
    config_json: Path | None,
    pretrained: str | None,
    labels: int | None,
    torch_class: str | None,
    kwargs: str,
    allow_module: tuple[str, ...],
    seed: int,
    out: Path,
) -> None:
    """Write a model directory with random weights, or with those of a trained model and a new head."""
    from hypha.accelerate_executor.modeling.create import (
        create_allowed_torch_model,
        create_model,
        create_torch_model,
        read_config,
    )

    if pretrained is None and labels is not None:
        raise click.UsageError("--labels needs --from; a config.json has num_labels")
    if pretrained is not None and any((arch, config_json, torch_class)):
        raise click.UsageError("give either --from or a configuration: --arch, --config-json or --torch-class")
    if pretrained is not None:
        from hypha.accelerate_executor.modeling.create import create_from_pretrained

        made = create_from_pretrained(task, pretrained, labels, seed, out)
        click.echo(f"{out}: {made.parameters} parameters; new: {', '.join(made.new) or 'none'}")
        return
    if torch_class is not None:
        parameters = create_torch_model(torch_class, kwargs, seed, out)
    elif task == "torch" and config_json is not None:
        parameters = create_allowed_torch_model(config_json, allow_module, seed, out)
    else:
        parameters = create_model(task, read_config(arch, config_json), seed, out)
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
    loss = train_locally(
        task, model, slices, out, learning_rate=learning_rate, batch_size=batch_size, steps=steps, seed=seed
    )
    click.echo(json.dumps({"loss": loss, "steps": steps}))


@main.command("evaluate")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model directory.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Safetensors file, or a folder of them.")
@click.option(
    "--preprocessor",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the tokenizer or image processor that the job applies.",
)
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Samples computed at once.")
@click.option("--allow-module", multiple=True, metavar="NAME", help="A module whose classes task torch may use.")
def measure(
    task: str, model: Path, data: Path, preprocessor: Path | None, batch_size: int, allow_module: tuple[str, ...]
) -> None:
    """Print accuracy and loss of a model on a file of samples, as one JSON line."""
    from hypha.accelerate_executor.modeling.evaluation import evaluate

    result = evaluate(task, model, data, batch_size, allow_module, preprocessor)
    if result.loss is not None and not math.isfinite(result.loss):
        click.echo(f"the loss is {result.loss}: weights or data hold NaN, or too large numbers", err=True)
        result = dataclasses.replace(result, loss=None)
    click.echo(json.dumps(dataclasses.asdict(result)))


@main.command("check-model")
@click.option("--task", default="image-classification", show_default=True, help="Task as jobs name it, e.g. causal-lm.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), required=True, help="Model directory.")
@click.option("--allow-module", multiple=True, metavar="NAME", help="A module whose classes task torch may use.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides the changes.")
def check(task: str, model: Path, allow_module: tuple[str, ...], seed: int) -> None:
    """Check that a job would deliver this model with the trained weights, whatever they are.

    Changes all weights, takes the change through the files of a job, loads the result and compares its weights and
    outputs with those of the changed model. Prints one JSON line.
    """
    from hypha.accelerate_executor.modeling.round_trip import check_round_trip

    result = check_round_trip(task, model, allow_module, seed)
    click.echo(json.dumps(dataclasses.asdict(result)))


@main.command("session")
def execute_lines() -> None:
    """Execute commands from standard input: each line is a JSON array of arguments.

    Each is answered by one line, {"status": 0, "output": "what it printed"}; after a failure the status is another one
    and the output says why. Torch is imported once for all of them.
    """
    for line in sys.stdin.buffer:
        click.echo(json.dumps(_execute(line)))


def _execute(line: bytes) -> dict[str, Any]:
    """Execute one command of this program; return its exit status and what it printed."""
    printed = io.StringIO()
    try:
        arguments = _arguments(line)
        with contextlib.redirect_stdout(printed):
            status = main.main(arguments, prog_name="hypha-accelerate-executor", standalone_mode=False)
    except click.ClickException as error:
        return {"status": error.exit_code, "output": error.format_message()}
    return {"status": status or 0, "output": printed.getvalue()}


def _arguments(line: bytes) -> list[str]:
    shown = quote(line.decode(errors="replace").strip())
    try:
        found = parse_json(line)
    except ValueError as error:
        raise click.UsageError(f"{shown} is not JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise click.UsageError(f"{shown} is not an array of strings")
    return found
