"""Command line `hypha-local`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import click

from hypha_local.demo_tasks import DIGITS, TASKS
from hypha_local.errors import LocalError

_SIGNALLED: Final = 128
"""Added to a signal's number for the exit status of a run ended by it, as shells do."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-local", prog_name="hypha-local")
def main() -> None:
    """Run a complete Hypha network on this machine, with every node as a process."""


@main.command()
@click.option("--task", type=click.Choice(list(TASKS)), default=DIGITS.name, show_default=True, help="What to learn.")
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Training workers.")
@click.option("--rounds", type=click.IntRange(min=1), help="Number of rounds.  [default: what the task needs]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Initial weights, data order.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("hypha-demo"),
    show_default=True,
    help="Run directory; results of an earlier run are replaced.",
)
@click.option("--keep", is_flag=True, help="Keep certificates, configuration, slices and work directories too.")
@click.option(
    "--compare", is_flag=True, help="Then train each worker alone on its shard for comparison; doubles the time."
)
@click.option("--timeout", type=click.FloatRange(min=1), default=900.0, show_default=True, help="Seconds to train.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the summary.",
)
@click.option("--no-color", is_flag=True, help="No colors and no progress bar.")
def demo(
    task: str,
    workers: int,
    rounds: int | None,
    seed: int,
    folder: Path,
    keep: bool,
    compare: bool,
    timeout: float,
    form: str,
    no_color: bool,
) -> None:
    """Train with DiLoCo over a network of local processes.

    digits: a classifier of handwritten digits. text: a language model of bytes, on the source of the running
    interpreter's standard library; its loss is in nats a byte.

    Leaves model/, metrics.jsonl, summary.json, the test set and every process's log in the run directory.
    Progress goes to stderr, the summary to stdout.
    """
    for number in _SIGNALS:
        signal.signal(number, _exit_on_signal)
    from rich.console import Console

    from hypha_local.demo import run_demo
    from hypha_local.network_layout import Folders, Training

    console = Console(stderr=True, no_color=no_color, force_terminal=False if no_color else None)
    folders = Folders(folder.resolve())
    chosen = TASKS[task]
    rounds = rounds or chosen.rounds
    training = Training(workers, rounds, seed, chosen, evaluate_every=chosen.evaluate_every)

    async def work() -> None:
        summary = await run_demo(folders, training, keep=keep, console=console, timeout=timeout, compare=compare)
        click.echo(summary.as_json() if form == "json" else summary.as_text())

    sys.exit(_run(work))


def _run(work: Callable[[], Awaitable[None]]) -> int:
    """Run `work` to its end, an error or a signal; return the exit status.

    Signals are handled until `work` has cleaned up, so that a second Ctrl-C does not interrupt the clean-up.
    """
    status = 0

    async def main_task() -> None:
        nonlocal status
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as working:
                    tasks.start_soon(watch, signals, working)
                    try:
                        await work()
                    except* (LocalError, OSError) as group:
                        status = status or 1
                        for error in _flatten(group):
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


def _flatten(group: BaseExceptionGroup[LocalError | OSError]) -> list[BaseException]:
    """Return the errors of a possibly nested exception group."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
