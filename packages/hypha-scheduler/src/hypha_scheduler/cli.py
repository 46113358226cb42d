"""Command line `hypha-scheduler`: the commands that all daemons have, and those about jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hypha_net.node.cli import UnreachableNetworkError, config_option, daemon_cli, load_configuration, set_option
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.errors import JobFailedError

if TYPE_CHECKING:
    from hypha_scheduler.submission.resumption import ResumableJob

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
            for warning in answer.get("warnings", ()):
                click.echo(f"warning: {warning}", err=True)
    except NoSchedulerError as error:
        raise UnreachableNetworkError(str(error)) from None
    except JobFileError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@config_option
@set_option
@click.option("--detach", is_flag=True, help="Return when a running scheduler has accepted the job.")
def resume(run_dir: Path, file: Path | None, settings: tuple[str, ...], detach: bool) -> None:
    """Continue the job in RUN_DIR, which was interrupted or has failed.

    RUN_DIR is the job's directory under output_dir. The scheduler of the --config file runs it, if it is running;
    otherwise this command runs it itself. The job is the one that its journal has accepted. Its secrets come from the
    job in the --config file, which must be the same but for its resources. Exit codes: 0 the job finished (with
    --detach: was accepted), 1 it failed, 2 it cannot be resumed; then nothing was written.
    """
    from hypha_scheduler.submission.resumption import ResumeError, find_resumable

    config = load_configuration(SchedulerConfig, file, settings, "hypha-scheduler")
    try:
        found = find_resumable(run_dir, config.runs_dir, config.jobs, config.scheduler.strategies)
        if not _resume_at_running(config, found, detach=detach):
            _resume_here(config, found)
    except ResumeError as error:
        raise click.UsageError(str(error)) from None


def _resume_at_running(config: SchedulerConfig, found: ResumableJob, *, detach: bool) -> bool:
    """Let a running scheduler resume a job; return False if none is running."""
    import json

    from hypha_scheduler.submission.client import NoSchedulerError, SchedulerEndedError, resume_job
    from hypha_scheduler.submission.resumption import ResumeError, revealed
    from hypha_scheduler.submission.server import socket_path

    accepted = False
    try:
        for answer in resume_job(socket_path(config.runs_dir), found.directory, revealed(found.job), detach=detach):
            if "error" in answer:
                raise click.ClickException(answer["error"]) if accepted else ResumeError(answer["error"])
            accepted = True
            click.echo(json.dumps(answer))
    except SchedulerEndedError as error:
        raise UnreachableNetworkError(str(error)) from None
    except NoSchedulerError:
        return False
    return True


def _resume_here(config: SchedulerConfig, found: ResumableJob) -> None:
    """Run a scheduler until the job has ended, and exit with its code."""
    from functools import partial
    from importlib.metadata import version

    from hypha_net.node.lifecycle import early_signals, run_daemon
    from hypha_net.node.logging_setup import configure_logs
    from hypha_scheduler.service import serve_resumed

    configure_logs()
    with early_signals():
        serve = partial(serve_resumed, found=found)
        code = run_daemon(
            config, serve, role="scheduler", version=version("hypha-scheduler"), expected=(JobFailedError,)
        )
    click.get_current_context().exit(code)


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def audit(run_dir: Path) -> None:
    """Prove that each row of an inference job in RUN_DIR has exactly one result.

    The journal, the dataset's manifest and the parts are read, and every digest is compared. Exit codes: 0 it is
    proven, 1 it is not, with the reasons, 2 RUN_DIR is no directory of an inference job.
    """
    from hypha_scheduler.audit import NoAuditError
    from hypha_scheduler.audit import audit as audit_job

    try:
        found = audit_job(run_dir)
    except NoAuditError as error:
        raise click.UsageError(str(error)) from None
    click.echo(str(found))
    if found.faults:
        raise click.ClickException("\n".join(["not proven:", *found.faults]))


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
