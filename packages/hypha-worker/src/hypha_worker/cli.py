"""The command ``hypha-worker``: the commands of every daemon, ``init`` with this machine's resources, and its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hypha_net.node.cli import ConfigurationError, Program, config_option
from hypha_worker.config import WorkerConfig
from hypha_worker.content_cache import CacheError
from hypha_worker.control.cli import accounts, drain, load_worker, pause, resume, status
from hypha_worker.errors import IsolationError

if TYPE_CHECKING:
    from hypha_net.node.checks import Check
    from hypha_net.node.lifecycle import Node
    from hypha_worker.logs.reader import StoredLog

WORK_DIR = "hypha-work"
FOLLOW_PAUSE = 0.25
"""Seconds between looking for further output."""


async def _serve(config: WorkerConfig, node: Node) -> None:
    from hypha_worker.service import serve  # imported late: `init` and `config` do not need it

    await serve(config, node)


def example() -> dict[str, Any]:
    """Return the values that ``init`` fills in: a cache, the detected resources, and both kinds of executor."""
    from hypha_worker.hardware.detection import detect

    arguments = ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    train = {"class": "train", "name": "diloco-transformer", "runtime": "process"}
    server = {"class": "aggregate", "name": "parameter-server", "runtime": "parameter-server"}
    command, *interpreter = _trainer()
    module = "hypha.accelerate_executor.training"
    return {
        "work_dir": WORK_DIR,
        "cache": {"path": "hypha-cache"},
        "resources": detect(Path(WORK_DIR)),
        "executors": [
            {
                **train,
                "cmd": command,
                "args": [*interpreter, "-m", module, *arguments],
                "check": [command, *interpreter, "-c", f"import torch, transformers, {module}"],
            },
            server,
        ],
    }


def _trainer() -> list[str]:
    """Return the training executor's Python: that of this environment if installed here, else through uv."""
    try:
        found = find_spec("hypha.accelerate_executor")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return [sys.executable]
    return ["uv", "run", "--no-project", "--with", "hypha-accelerate-executor", "--", "python"]


def _examine() -> tuple[Sequence[str], dict[str, Any]]:
    from hypha_worker.executors.isolation.assessment import describe_probe
    from hypha_worker.executors.isolation.stack import make_stack

    with tempfile.TemporaryDirectory(prefix="hypha-probe-") as folder:
        return describe_probe(make_stack(Path(folder)).findings)


def _checks(config: WorkerConfig, live: bool) -> Iterator[Check]:
    from hypha_worker.checks import check_worker  # imports what only this command needs

    return check_worker(config, live=live)


main = Program(
    "hypha-worker",
    lambda: WorkerConfig,
    _serve,
    role="worker",
    example=example,
    expected=(IsolationError, CacheError),
    examine=_examine,
    checks=_checks,
).cli()


for command in (status, pause, resume, drain, accounts):
    main.add_command(command)


@main.command(short_help="Print the output of a job; without JOB, list all logs.")
@click.argument("job", required=False)
@config_option
@click.option("--follow", is_flag=True, help="Print further output as it comes, until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), default=None, help="Print only so many of the last lines.")
def logs(job: str | None, file: Path | None, tail: int | None, *, follow: bool) -> None:
    """Print the output of a job on this machine, whether the worker runs or not.

    JOB is the beginning of the job's id, or JOB/TASK with a task's name or the beginning of a lease; without it, all
    logs are listed, the latest last. Of several attempts at a task the latest is printed. Exit codes: 0 printed, 1 the
    logs cannot be read, 2 there is no such log, or JOB means several.
    """
    import time
    from functools import partial

    from hypha_worker.logs.reader import LogNotFoundError, find_log, follow_log, list_logs, read_log

    folder = load_worker(file).log_folder().folder
    try:
        if job is None:
            found = list_logs(folder)
            click.echo(describe_logs(found), nl=False)
            if not found:
                click.echo(f"no job has written a log in {folder} yet", err=True)
            return
        path = find_log(folder, job).path
        wait = partial(time.sleep, FOLLOW_PAUSE)
        for part in follow_log(path, wait, tail) if follow else read_log(path, tail):
            click.echo(printable(part) if sys.stdout.isatty() else part, nl=False)
    except LogNotFoundError as error:
        raise ConfigurationError(f"{error}\n{describe_logs(error.matches)}".rstrip()) from None
    except OSError as error:
        raise click.ClickException(f"the logs cannot be read: {error}; run this as the user of the worker") from None


def describe_logs(logs: Sequence[StoredLog]) -> str:
    """Return a line for each log: its name, when it was last written, and whether its job still runs."""
    return "".join(
        f"{log}  {datetime.fromtimestamp(log.written).astimezone():%Y-%m-%d %H:%M:%S}"
        f"{'' if log.has_ended else '  running'}\n"
        for log in logs
    )


def printable(output: bytes) -> str:
    """Return a job's output for a terminal, with control characters escaped but tabs and line endings."""
    text = output.decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\t\r\n" else f"\\x{ord(char):02x}" for char in text)
