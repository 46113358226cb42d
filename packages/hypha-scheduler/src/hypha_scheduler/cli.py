"""Command line `hypha-scheduler`: the commands that all daemons have, `submit` and `export-metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hypha_net.node.cli import UnreachableNetworkError, config_option, daemon_cli
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.errors import JobFailedError

_EXAMPLE: dict[str, Any] = {
    "output_dir": "runs",
    "scheduler": {
        "job": {
            "dataset": {"dataset": "imagenet"},
            "model": {"repository": "microsoft/resnet-18", "type": "vision-classification"},
            "inner_optimizer": {"learning_rate": 0.001},
            "resources": {"num_workers": 4},
        }
    },
}


async def _serve(config: SchedulerConfig, node: Any) -> None:
    from hypha_scheduler.service import serve  # imported late: `--help` and `init` do not need it

    await serve(config, node)


main = daemon_cli(
    "hypha-scheduler", SchedulerConfig, _serve, role="scheduler", example=_EXAMPLE, expected=(JobFailedError,)
)


@main.command()
@click.argument("job", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@config_option
@click.option("--socket", type=click.Path(path_type=Path), default=None, help="Socket of the running scheduler.")
@click.option("--detach", is_flag=True, help="Return when the job is accepted instead of when it has ended.")
def submit(job: Path, file: Path | None, socket: Path | None, detach: bool) -> None:
    """Submit the job in JOB, a TOML file or a list of tasks in a .json file, to a running scheduler.

    The scheduler is found by --socket, or by the output_dir of its own --config file. Exit codes: 0 the job finished
    (with --detach: was accepted), 1 the job failed, 2 the job is invalid, 3 no scheduler is running there.
    """
    import json

    from hypha_scheduler.submission.client import (
        JobFileError,
        NoSchedulerError,
        configured_socket,
        read_job,
        submit_job,
    )

    accepted = False
    try:
        for answer in submit_job(socket or configured_socket(file), read_job(job), detach=detach):
            if "error" in answer:
                raise click.ClickException(answer["error"]) if accepted else JobFileError(f"{job}: {answer['error']}")
            accepted = True
            click.echo(json.dumps(answer))
    except NoSchedulerError as error:
        raise UnreachableNetworkError(str(error)) from None
    except JobFileError as error:
        raise click.UsageError(str(error)) from None


@main.command("export-metrics")
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--tensorboard",
    "out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the event files, with a subdirectory for the job and one for each worker.",
)
def export_metrics(run_dir: Path, out: Path) -> None:
    """Convert a job's metrics.jsonl to TensorBoard event files.

    RUN_DIR is a job's directory under output_dir, or the run directory of `hypha-local demo`. Of a running job the
    metrics so far are exported. View the files with `tensorboard --logdir`; this command does not need TensorBoard.
    """
    from hypha_scheduler.metrics.tensorboard import MetricsFileError
    from hypha_scheduler.metrics.tensorboard import export_metrics as export

    try:
        count = export(run_dir, out)
    except MetricsFileError as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"{count} values in {out}; view them with: tensorboard --logdir {out}")
