"""The command `hypha-local`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import click

from hypha_local.errors import LocalError

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypha-local", prog_name="hypha-local")
def main() -> None:
    """Run a whole Hypha network on this machine, every node a process of its own."""


@main.command()
@click.option("--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Training workers.")
@click.option("--rounds", type=click.IntRange(min=1), default=16, show_default=True, help="Synchronisations.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Initial weights, data order.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("hypha-demo"),
    show_default=True,
    help="Run directory; what an earlier run left there is replaced.",
)
@click.option("--keep", is_flag=True, help="Keep certificates, configuration, slices and work directories too.")
@click.option("--timeout", type=click.FloatRange(min=1), default=900.0, show_default=True, help="Seconds to train for.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of the summary."
)
@click.option("--no-color", is_flag=True, help="No colours and no moving bar.")
def demo(
    workers: int, rounds: int, seed: int, folder: Path, keep: bool, timeout: float, form: str, no_color: bool
) -> None:
    """Train a digits classifier with DiLoCo over a network of local processes.

    Leaves model/, metrics.jsonl, summary.json, the test set and every process's log in the run directory.
    Progress goes to stderr, the summary to stdout.
    """
    from rich.console import Console

    from hypha_local.demo import run_demo
    from hypha_local.plan import Folders, Training

    console = Console(stderr=True, no_color=no_color, force_terminal=False if no_color else None)
    folders = Folders(folder.resolve())
    training = Training(workers=workers, rounds=rounds, seed=seed)

    async def work() -> None:
        summary = await run_demo(folders, training, keep=keep, console=console, timeout=timeout)
        click.echo(summary.as_json() if form == "json" else summary.as_text())

    sys.exit(_run(work))


def _run(work: Callable[[], Awaitable[None]]) -> int:
    """Run to the end, to an error, or to a signal; the exit status."""
    status = 0

    async def main_task() -> None:
        nonlocal status
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_signals, tasks.cancel_scope)
            try:
                await work()
            except* LocalError as group:
                status = 1
                for error in _leaves(group):
                    click.echo(f"Error: {error}", err=True)
            tasks.cancel_scope.cancel()

    async def watch_signals(scope: anyio.CancelScope) -> None:
        nonlocal status
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            async for number in signals:
                if status != INTERRUPTED:
                    status = INTERRUPTED
                    click.echo(f"{number.name}: ending every process", err=True)
                    scope.cancel()

    anyio.run(main_task, backend="trio")
    return status


def _leaves(group: BaseExceptionGroup[LocalError]) -> list[BaseException]:
    """The errors of a group of groups."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
