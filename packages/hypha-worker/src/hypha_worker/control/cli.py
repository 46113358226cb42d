"""The commands of a worker's owner: ``status``, ``pause``, ``resume``, ``drain`` and ``accounts``.

Added to ``hypha-worker`` by `hypha_worker.cli`. They find the worker by --socket, or by the work_dir of its --config.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from hypha_net.node.cli import (
    ConfigurationError,
    UnreachableNetworkError,
    config_option,
    format_option,
    since_option,
    table_format_option,
)
from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import load_config
from hypha_worker.config import WorkerConfig
from hypha_worker.leasing.terms import MAX_DRAIN

F = TypeVar("F", bound=Callable[..., None])


def _worker_options(command: F) -> F:
    """Add the options by which a command finds the running worker."""
    option = click.option(
        "--socket", type=click.Path(path_type=Path), default=None, help="Control socket of the running worker."
    )
    return config_option(option(command))


@click.command()
@_worker_options
@format_option
def status(file: Path | None, socket: Path | None, form: str) -> None:
    """Show what the running worker does: gateways, leases, jobs, and the last 20 requests.

    A request without an offer has the reason beside it. Exit codes: 0 shown, 1 the worker did not answer, 2 wrong
    usage, 3 no worker is running there.
    """
    from hypha_worker.control.display import render_status

    answer = _ask(socket or _configured_socket(file), "status")
    click.echo(json.dumps(answer) if form == "json" else render_status(answer), nl=form == "json")


@click.command()
@_worker_options
def pause(file: Path | None, socket: Path | None) -> None:
    """Let the running worker make no more offers, until `resume`; its leases and jobs go on.

    It stays paused when it is started again. Exit codes as for status.
    """
    jobs = _ask(socket or _configured_socket(file), "pause")["jobs"]
    click.echo(f"paused: no more offers, also after a restart; {jobs} jobs go on")


@click.command()
@_worker_options
def resume(file: Path | None, socket: Path | None) -> None:
    """Let the running worker make offers again, after `pause`, and with executors that failed at their start.

    Exit codes as for status.
    """
    draining = _ask(socket or _configured_socket(file), "resume")["draining"]
    click.echo("resumed, but it drains and makes no offers before it is started again" if draining else "resumed")


@click.command()
@_worker_options
@click.option(
    "--deadline",
    "--timeout",
    "timeout",
    type=click.FloatRange(min=0, max=MAX_DRAIN),
    default=None,
    help="Seconds that running jobs have to end; by default the drain_timeout of the running worker.",
)
def drain(file: Path | None, socket: Path | None, timeout: float | None) -> None:
    """Drain the running worker and wait until it has ended.

    It makes no more offers, tells its schedulers, and ends when its running jobs have ended, at the latest after
    --deadline. It is found by --socket, or by the work_dir of its own --config file. Interrupting this command does
    not stop the drain. Exit codes: 0 all jobs had ended, 1 some were cancelled or the worker ended otherwise, 2 wrong
    usage, 3 no worker is running there.
    """
    from hypha_worker.control.client import drain_worker

    answer: dict[str, Any] = {}
    with _errors():
        for answer in drain_worker(socket or _configured_socket(file), timeout):
            click.echo(json.dumps(answer))
    if answer.get("cancelled"):
        raise click.ClickException(f"{len(answer['cancelled'])} jobs did not end in time and were cancelled")


@click.command()
@config_option
@since_option
@table_format_option
def accounts(file: Path | None, since: float, form: str) -> None:
    """Print what each lease has earned: job, scheduler, seconds, price, tokens and outcome.

    Also while no worker runs. The earliest lease comes first. Exit codes: 0 printed, 1 the accounts cannot be read, 2
    wrong usage.
    """
    import time

    from hypha_worker.accounts.storage import read_accounts
    from hypha_worker.control.display import show_accounts

    try:
        found = read_accounts(load_worker(file).work_dir, time.time())
    except OSError as error:
        raise click.ClickException(f"the accounts cannot be read: {error}; run this as the worker's user") from None
    click.echo(show_accounts([account for account in found if account.updated >= since], form), nl=False)


def _ask(path: Path, command: str) -> dict[str, Any]:
    from hypha_worker.control.client import ask_worker

    with _errors():
        return ask_worker(path, command)


@contextmanager
def _errors() -> Iterator[None]:
    """Exit with the code and the message for what went wrong."""
    from hypha_worker.control.client import CommandFailedError, NoWorkerError

    try:
        yield
    except NoWorkerError as error:
        raise UnreachableNetworkError(str(error)) from None
    except CommandFailedError as error:
        raise click.ClickException(str(error)) from None


def _configured_socket(file: Path | None) -> Path:
    """Return the control socket of the worker with this configuration."""
    from hypha_worker.control.server import socket_path

    return socket_path(load_worker(file, "--socket PATH, or --config with its file").work_dir)


def load_worker(file: Path | None, remedy: str = "--config with its file") -> WorkerConfig:
    """Return the configuration of the worker that a command is about, or exit with code 2."""
    try:
        return load_config(WorkerConfig, file, os.environ, {}).config
    except ConfigError as error:
        raise ConfigurationError(f"name the worker: {remedy}\n{error}") from None
