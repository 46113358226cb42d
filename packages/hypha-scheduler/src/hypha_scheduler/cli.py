"""Command line `hypha-scheduler`: the commands that all daemons have, and those about jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hypha_net.node.cli import (
    InitFile,
    Program,
    UnreachableNetworkError,
    config_option,
    load_configuration,
    set_option,
)
from hypha_scheduler.cli_jobs import add_job_commands, show_answers
from hypha_scheduler.errors import JobFailedError, JobRefusedError

if TYPE_CHECKING:
    from hypha_net.node.checks import Check
    from hypha_scheduler.config import SchedulerConfig
    from hypha_scheduler.submission.resumption import ResumableJob

_EXAMPLE_JOB: dict[str, Any] = {
    "dataset": {"dataset": "imagenet"},
    "model": {"repository": "microsoft/resnet-18", "type": "vision-classification"},
    "inner_optimizer": {"learning_rate": 0.001},
    "resources": {"num_workers": 4},
}
_EXAMPLE: dict[str, Any] = {"output_dir": "runs", "scheduler": {"job": _EXAMPLE_JOB}}


def _load_model() -> type[SchedulerConfig]:
    from hypha_scheduler.config import SchedulerConfig

    return SchedulerConfig


async def _serve(config: SchedulerConfig, node: Any) -> None:
    from hypha_scheduler.service import serve  # imported late: `--help` and `init` do not need it

    await serve(config, node)


def _checks(config: SchedulerConfig, _live: bool) -> Iterator[Check]:
    from hypha_net.node.checks import check_folder

    yield from check_folder("output_dir", config.runs_dir)


def _job_file() -> str:
    """Return a commented job file to start from."""
    from hypha_net.node.config.toml_output import render_table
    from hypha_scheduler.strategies.registry import DEFAULT_TYPE, load_strategy

    head = [
        "A job of DiLoCo training. Every option is listed; those behind a # are at their default.",
        "Run it with: hypha-scheduler submit FILE --config SCHEDULER_FILE, where a scheduler is running.",
    ]
    return render_table(load_strategy(DEFAULT_TYPE).job_table, {"type": DEFAULT_TYPE, **_EXAMPLE_JOB}, head)


main = Program(
    "hypha-scheduler",
    _load_model,
    _serve,
    role="scheduler",
    example=_EXAMPLE,
    expected=(JobFailedError,),
    checks=_checks,
    init_file=InitFile("job", "Write a job file for `submit` instead.", _job_file),
).cli()


add_job_commands(main)


@main.command()
@click.argument("job")
@config_option
@set_option
@click.option("--detach", is_flag=True, help="Return when a running scheduler has accepted the job.")
def resume(job: str, file: Path | None, settings: tuple[str, ...], detach: bool) -> None:
    """Continue a job that was interrupted, cancelled, or failed.

    JOB is the job's directory, its name, or the beginning of its name or id under output_dir. The scheduler of the
    --config file runs it, if it is running; otherwise this command runs it itself. The job is the one that its journal
    has accepted. Its secrets come from the job in the --config file, which must be the same but for its name and
    resources. Exit codes: 0 the job finished (with --detach: was accepted), 1 it failed, 2 it cannot be resumed; then
    nothing was written; 3 the running scheduler was stopped before the job had ended.
    """
    from hypha_scheduler.cli_jobs import find_directory
    from hypha_scheduler.submission.resumption import find_resumable

    config = load_configuration(_load_model(), file, settings, "hypha-scheduler")
    try:
        found = find_resumable(
            find_directory(job, config.runs_dir), config.runs_dir, config.jobs, config.scheduler.strategies
        )
        if not _resume_at_running(config, found, detach=detach):
            _resume_here(config, found)
    except JobRefusedError as error:
        raise click.UsageError(str(error)) from None


def _resume_at_running(config: SchedulerConfig, found: ResumableJob, *, detach: bool) -> bool:
    """Let a running scheduler resume a job; return False if none is running."""
    from hypha_scheduler.submission.client import NoSchedulerError, SchedulerEndedError, resume_job, socket_path
    from hypha_scheduler.submission.resumption import revealed

    socket = socket_path(config.runs_dir)
    answers = resume_job(socket, found.directory, revealed(found.job), detach=detach)
    try:
        show_answers(answers, socket, JobRefusedError, detach=detach)
    except SchedulerEndedError as error:
        raise UnreachableNetworkError(str(error)) from None
    except NoSchedulerError:
        return False
    return True


def _resume_here(config: SchedulerConfig, found: ResumableJob) -> None:
    """Run a scheduler until the job has ended, and exit with its code."""
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
    """Prove from the files in RUN_DIR that each row or sample was used as the job claims.

    Of an inference job: each row of the dataset has exactly one result. Of a DiLoCo job, also one that runs: each
    sample is in exactly one contribution to a round or in none, in each epoch; every round begins with the weights
    that the one before ended with; and the last ones are there. Every digest is compared. Exit codes: 0 it is proven,
    1 it is not, with the reasons, 2 RUN_DIR is no directory of such a job.
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


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the dataset's slices.")
@click.option("--preprocessor", type=click.Path(path_type=Path), help="Folder of a preprocessor from a hub.")
@click.option("--executor", metavar="CMD", help="Command that computes, if not hypha-accelerate-executor's from here.")
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with: as many as each worker had.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="Difference of an outer update that counts as rounding, relative to its largest number.",
)
def replay(
    run_dir: Path,
    data: Path | None,
    preprocessor: Path | None,
    executor: str | None,
    threads: int | None,
    tolerance: float,
) -> None:
    """Compute the rounds of the DiLoCo job in RUN_DIR again and compare them with its journal.

    On the machine of the workers, with their number of threads, everything is equal to the bit; elsewhere each round is
    computed from its own recorded start, if the job has kept its outer updates (rounds.keep_updates), and the largest
    difference is shown. Nothing in RUN_DIR is written. Exit codes: 0 the record is proven, 1 it is not, with the
    reasons, 2 the directory, the start model or the dataset is not that of the job.
    """
    from hypha_scheduler.replay import plan_replay, run_replay
    from hypha_scheduler.strategies.replayable import ReplayOptions

    try:
        plan = plan_replay(run_dir, ReplayOptions(data, preprocessor, threads, tolerance))
        proven = run_replay(plan, executor, click.echo)
    except JobRefusedError as error:
        raise click.UsageError(str(error)) from None
    if not proven:
        click.get_current_context().exit(1)


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
    metrics so far are exported. View the files with `tensorboard --logdir`. Needs the extra "tensorboard".
    """
    from hypha_scheduler.metrics.tensorboard import MetricsFileError
    from hypha_scheduler.metrics.tensorboard import export_metrics as export

    try:
        count = export(run_dir, out)
    except MetricsFileError as error:
        raise click.UsageError(str(error)) from None
    except ImportError as error:
        raise click.UsageError(f"{error}: install the extra, hypha-scheduler[tensorboard]") from None
    click.echo(f"{count} values in {out}; view them with: tensorboard --logdir {out}")
