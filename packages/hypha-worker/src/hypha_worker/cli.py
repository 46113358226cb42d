"""The command ``hypha-worker``: the commands of every daemon, ``init`` with this machine's resources, and ``drain``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hypha_net.node.cli import ConfigurationError, UnreachableNetworkError, config_option, daemon_cli
from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import load_config
from hypha_worker.config import WorkerConfig
from hypha_worker.leasing.terms import MAX_DRAIN

if TYPE_CHECKING:
    from hypha_net.node.lifecycle import Node

WORK_DIR = "hypha-work"


async def _serve(config: WorkerConfig, node: Node) -> None:
    from hypha_worker.service import serve  # imported late: `init` and `config` do not need it

    await serve(config, node)


def example() -> dict[str, Any]:
    """Return the values that ``init`` fills in: the detected resources, and both kinds of executor."""
    from hypha_worker.hardware.detection import detect

    found = detect(Path(WORK_DIR))
    resources: dict[str, Any] = {"cpu": float(found.cpu), "memory": found.memory, "storage": found.storage}
    if found.devices:
        resources["gpu"] = sum(memory for _, memory in found.devices)
        resources["devices"] = [{"index": index, "memory": memory} for index, memory in found.devices]
    arguments = ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    train = {"class": "train", "name": "diloco-transformer", "runtime": "process"}
    server = {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"}
    command, *args = _trainer()
    return {
        "work_dir": WORK_DIR,
        "resources": resources,
        "executors": [{**train, "cmd": command, "args": [*args, *arguments]}, server],
    }


def _trainer() -> list[str]:
    """Return the training executor's command: from this environment if installed here, else through uv."""
    module = ["-m", "hypha.accelerate_executor.training"]
    try:
        found = find_spec("hypha.accelerate_executor")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return [sys.executable, *module]
    return ["uv", "run", "--no-project", "--with", "hypha-accelerate-executor", "--", "python", *module]


main = daemon_cli("hypha-worker", WorkerConfig, _serve, role="worker", example=example)


@main.command()
@config_option
@click.option("--socket", type=click.Path(path_type=Path), default=None, help="Control socket of the running worker.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, max=MAX_DRAIN),
    default=None,
    help="Seconds that running jobs have to end; by default the drain_timeout of the running worker.",
)
def drain(file: Path | None, socket: Path | None, timeout: float | None) -> None:
    """Drain the running worker and wait until it has ended.

    It makes no more offers, tells its schedulers, and ends when its running jobs have ended, at the latest after
    --timeout. It is found by --socket, or by the work_dir of its own --config file. Interrupting this command does
    not stop the drain. Exit codes: 0 all jobs had ended, 1 some were cancelled or the worker ended otherwise, 2 wrong
    usage, 3 no worker is running there.
    """
    import json

    from hypha_worker.control.client import DrainFailedError, NoWorkerError, drain_worker

    answer: dict[str, Any] = {}
    try:
        for answer in drain_worker(socket or _configured_socket(file), timeout):
            click.echo(json.dumps(answer))
    except NoWorkerError as error:
        raise UnreachableNetworkError(str(error)) from None
    except DrainFailedError as error:
        raise click.ClickException(str(error)) from None
    if answer.get("cancelled"):
        raise click.ClickException(f"{len(answer['cancelled'])} jobs did not end in time and were cancelled")


def _configured_socket(file: Path | None) -> Path:
    """Return the control socket of the worker with this configuration."""
    import os

    from hypha_worker.control.server import socket_path

    try:
        return socket_path(load_config(WorkerConfig, file, os.environ, {}).config.work_dir)
    except ConfigError as error:
        raise ConfigurationError(f"name the worker: --socket PATH, or --config with its file\n{error}") from None
