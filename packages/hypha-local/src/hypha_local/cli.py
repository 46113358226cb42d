"""Command line `hypha-local`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import click

from hypha_local.demo_tasks import CLASSIFY, DIGITS, INFERENCE_TASKS, TASKS
from hypha_local.errors import LocalError
from hypha_net.errors import leaf_errors

if TYPE_CHECKING:
    from rich.console import Console

_SIGNALLED: Final = 128
"""Added to a signal's number for the exit status of a run ended by it, as shells do."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Summary(Protocol):
    def as_json(self) -> str: ...
    def as_text(self) -> str: ...


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-local", prog_name="hypha-local")
def main() -> None:
    """Run a complete Hypha network on this machine, with every node as a process."""


@main.command()
@click.option(
    "--task",
    type=click.Choice([*TASKS, *INFERENCE_TASKS]),
    default=DIGITS.name,
    show_default=True,
    help="What to learn, or to compute with a model.",
)
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Workers.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of training.  [default: what the task needs]")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Initial weights, data order, sampling."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Run directory; an earlier run is replaced.  [default: hypha-demo; inference, generate: hypha-inference]",
)
@click.option("--keep", is_flag=True, help="Keep certificates, configuration, slices and work directories too.")
@click.option(
    "--compare", is_flag=True, help="Then train each worker alone on its shard for comparison; doubles the time."
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="inference, generate: directory of the model, such as hypha-demo/model.  [default: train one first]",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="generate: JSON lines with the key prompt.  [default: beginnings of Python functions]",
)
@click.option(
    "--kill",
    type=click.Choice(["worker", "executor", "parameter-server", "scheduler", "data"]),
    help="Kill this process when 40 % is done. digits, text: a spare worker replaces it, or it is started again. "
    "Inference, which has no parameter server, then takes 0.25 s longer for each batch.",
)
@click.option("--timeout", type=click.FloatRange(min=1), default=900.0, show_default=True, help="Seconds for the job.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the summary.",
)
@click.option("--no-color", is_flag=True, help="No colors and no progress bar.")
def demo(task: str, format_: str, no_color: bool, **options: Any) -> None:
    """Train, or compute with a model, over a network of local processes.

    digits: train a classifier of handwritten digits with DiLoCo. text: a language model of bytes, on the source of the
    running interpreter's standard library; its loss is in nats a byte.

    inference: classify the 360 test images of digits. generate: a language model continues prompts. Both train a model
    first unless --model names one.

    Leaves summary.json, metrics.jsonl, model/ and every process's log in the run directory, and the test set or the
    results. Progress goes to stderr, the summary to stdout.
    """
    _check_options(task, options)
    run = _run_inference if task in INFERENCE_TASKS else _run_training

    async def work(console: Console) -> None:
        summary = await run(task, options, console)
        click.echo(summary.as_json() if format_ == "json" else summary.as_text())

    sys.exit(_run(work, no_color))


@main.command()
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Workers.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("hypha-network"),
    show_default=True,
    help="Directory of the network; a later start in it finds its jobs and datasets again.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="[NAME=]FOLDER",
    help="Serve this dataset, made by hypha-data prepare, too; may be repeated.  [default name: the folder's]",
)
@click.option("--no-color", is_flag=True, help="No colors.")
def up(workers: int, folder: Path, data: tuple[str, ...], no_color: bool) -> None:
    """Run a network of local processes in the foreground, which takes jobs until Ctrl-C.

    Starts a gateway, a data node, workers that train and infer, a parameter server and a scheduler, with certificates
    of their own. When every node is healthy, the commands that submit an example job and follow jobs are printed to
    stdout. The data node also serves every dataset in the directory's data/. A job that runs when the network is ended
    is interrupted. Training goes on at a start within the job's orphan_grace (60 s by default); `hypha-scheduler
    resume` continues other jobs.

    A worker may be drained: the network goes on without it. Exit codes: 130 after Ctrl-C, 0 after SIGTERM, 1 if another
    node has ended, or a worker has failed.
    """
    root = folder.resolve()

    async def work(console: Console) -> None:
        from hypha_local.foreground_network import ForegroundNetwork, named_datasets, run_network
        from hypha_local.network_layout import Folders

        network = ForegroundNetwork(Folders(root), workers, named_datasets(data))

        def ready() -> None:
            job, config = (shlex.quote(os.path.relpath(path)) for path in (network.job_file, network.scheduler_file))
            click.echo(f"submit the example job:  hypha-scheduler submit {job} --config {config}")
            click.echo(f"list jobs:               hypha-scheduler jobs --config {config}")
            click.echo("end the network:         Ctrl-C")

        await run_network(network, console, ready)

    status = _run(work, no_color)
    sys.exit(0 if status == _SIGNALLED + signal.SIGTERM else status)


def _check_options(task: str, options: Mapping[str, Any]) -> None:
    """Refuse options that a task does not have."""
    refused = ["model", "prompts"] if task in TASKS else ["compare"]
    refused += ["prompts"] if task == CLASSIFY.name else []
    if given := [f"--{name}" for name in refused if options[name]]:
        raise click.UsageError(f"{', '.join(given)}: not with --task {task}")
    if task in INFERENCE_TASKS and options["kill"] == "parameter-server":
        raise click.UsageError(f"--kill parameter-server: not with --task {task}, which has none")
    if options["model"] and options["rounds"]:
        raise click.UsageError("--rounds: not with --model, because nothing is trained")


async def _run_training(task: str, options: Mapping[str, Any], console: Console) -> _Summary:
    """Run the demo of a task that trains."""
    from hypha_local.demo import TrainingDemo
    from hypha_local.display import Display
    from hypha_local.network_layout import DemoTraining, Folders

    chosen = TASKS[task]
    rounds = options["rounds"] or chosen.rounds
    training = DemoTraining(options["workers"], rounds, options["seed"], chosen, chosen.evaluate_every)
    folders = Folders((options["folder"] or Path("hypha-demo")).resolve())
    own = {name: options[name] for name in ("timeout", "keep", "compare", "kill")}
    return await TrainingDemo(folders, training, Display(console, rounds), **own).run()


async def _run_inference(task: str, options: Mapping[str, Any], console: Console) -> _Summary:
    """Run the demo of a task that computes with a model."""
    from hypha_local.inference_demo import Inference, run_inference
    from hypha_local.network_layout import Folders

    chosen = INFERENCE_TASKS[task]
    inference = Inference(
        task=chosen,
        rounds=options["rounds"] or chosen.trained.rounds,
        **{name: options[name] and options[name].resolve() for name in ("model", "prompts")},
        **{name: options[name] for name in ("workers", "seed", "kill", "keep", "timeout")},
    )
    folders = Folders((options["folder"] or Path("hypha-inference")).resolve())
    return await run_inference(folders, inference, console)


def _run(work: Callable[[Console], Awaitable[None]], no_color: bool) -> int:
    """Run `work` to its end, an error or a signal; return the exit status.

    Signals are handled until `work` has cleaned up, so that a second Ctrl-C does not interrupt the clean-up.
    """
    for number in _SIGNALS:
        signal.signal(number, _exit_on_signal)
    from rich.console import Console

    console = Console(stderr=True, no_color=no_color, force_terminal=False if no_color else None)
    status = 0

    async def main_task() -> None:
        nonlocal status
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as working:
                    tasks.start_soon(watch, signals, working)
                    try:
                        await work(console)
                    except* (LocalError, OSError) as group:
                        status = status or 1
                        for error in leaf_errors(group):
                            click.echo(f"Error: {error}", err=True)
                tasks.cancel_scope.cancel()

    async def watch(signals: AsyncIterator[signal.Signals], working: anyio.CancelScope) -> None:
        nonlocal status
        async for number in signals:
            if not working.cancel_called:
                status = _SIGNALLED + number
                click.echo(f"{number.name}: ending every process", err=True)
                working.cancel()

    anyio.run(main_task, backend="trio")
    return status


def _exit_on_signal(number: int, _frame: object) -> None:
    """Exit on a signal before any process was started; an exception could be swallowed by a destructor."""
    os._exit(_SIGNALLED + number)
