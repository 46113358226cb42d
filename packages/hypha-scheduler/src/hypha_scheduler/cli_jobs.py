"""Commands of a running scheduler: ``submit``, ``jobs``, ``status``, ``attach``, ``logs``, ``cancel`` and ``nodes``.

``accounts`` needs none that runs.

Added to the command line by `cli`. What is slow to import is imported in the command that needs it.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from hypha_net.node.cli import UnreachableNetworkError, config_option, since_option, table_format_option
from hypha_net.node.exit_codes import BAD_USAGE, INTERRUPTED

if TYPE_CHECKING:
    from hypha_scheduler.submission.client import Heard, JobCommandError
    from hypha_scheduler.submission.log_client import LogLine

_LOG_PAUSE: Final = 1.0
"""Seconds between two requests for new lines."""
_EXIT_CODES: Final = {"finished": 0, "failed": 1, "cancelled": 1, "interrupted": 3}

_format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output."
)
_plain_option = click.option("--plain", is_flag=True, help="Print lines, also on a terminal, instead of a live view.")


class _NoSuchJobError(click.ClickException):
    """A name or id that no job has, or several have: exit code 2."""

    exit_code = BAD_USAGE


def add_job_commands(group: click.Group) -> None:
    """Add the commands to a command line."""
    for command in (submit, list_jobs, status, attach, logs, cancel, accounts, nodes):
        group.add_command(command)


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Translate errors of the client to messages and exit codes."""
    from hypha_scheduler.submission.client import JobCommandError, JobFileError, NoSchedulerError

    try:
        yield
    except NoSchedulerError as error:
        raise UnreachableNetworkError(str(error)) from None
    except JobFileError as error:
        raise click.UsageError(str(error)) from None
    except JobCommandError as error:
        _refuse(error)


def _refuse(error: JobCommandError) -> NoReturn:
    """End with the reason for which a command was refused: exit code 2 if it names no job or several, or 1."""
    lines = [str(error), *(f"  {_line(entry)}" for entry in error.matches)]
    kind = _NoSuchJobError if error.code in ("ambiguous", "unknown") else click.ClickException
    raise kind("\n".join(lines))


def _at_scheduler(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name a scheduler to a command, which gets its socket, and translate errors of the client."""

    @config_option
    @click.option("--socket", type=click.Path(path_type=Path), default=None, help="Socket of the running scheduler.")
    @functools.wraps(command)
    def run(*, file: Path | None, socket: Path | None, **options: Any) -> None:
        from hypha_scheduler.submission.client import configured_socket

        with _exit_codes():
            command(scheduler=(socket or configured_socket(file)).resolve(), **options)

    return run


def _ask(scheduler: Path, **command: Any) -> dict[str, Any]:
    from hypha_scheduler.submission.client import send_command

    return send_command(scheduler, command)


@click.command()
@click.argument("job", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_at_scheduler
@click.option("--detach", is_flag=True, help="Return when the job is accepted instead of when it has ended.")
@click.option("--no-wait", is_flag=True, help="Fail if the job would have to wait for its turn or for workers.")
@_plain_option
@_format_option
def submit(job: Path, scheduler: Path, detach: bool, no_wait: bool, plain: bool, form: str) -> None:
    """Submit a job to a running scheduler, and follow it.

    JOB is a TOML file, such as `init --job` writes, or a .json file with a list of tasks. The scheduler is found by
    --socket, or by the output_dir of its own --config file. The job is followed as by `attach`; Ctrl-C ends only that.
    Exit codes: 0 the job finished (with --detach: was accepted), 1 the job failed, 2 the job is invalid, 3 no scheduler
    is running there, or it was stopped before the job had ended, 130 Ctrl-C.
    """
    from hypha_scheduler.submission.client import JobFileError, read_job, submit_job

    answers = submit_job(scheduler, read_job(job), detach=detach, wait=not no_wait)
    show_answers(answers, scheduler, lambda text: JobFileError(f"{job}: {text}"), form=form, plain=plain, detach=detach)


def show_answers(
    answers: Iterator[Heard],
    socket: Path,
    refused: Callable[[str], Exception] = click.ClickException,
    *,
    form: str = "text",
    plain: bool = True,
    detach: bool = False,
) -> Mapping[str, Any]:
    """Print a scheduler's answers about a job and, unless detached, what happens meanwhile; return the job.

    After Ctrl-C the job goes on.

    Args:
        answers: the answers, and the job's events.
        socket: of the scheduler.
        refused: makes the error to raise if the first answer is one.
        form: ``text`` for lines on standard error, ``json`` for an object a line on standard output.
        plain: whether text is printed as lines on a terminal, too, instead of a live view.
        detach: whether only the first answer is printed.
    """
    job: Mapping[str, Any] = {}
    try:
        first = next(answers).answer or {}
        if "error" in first:
            raise refused(first["error"])
        job = first.get("job", first)
        click.echo(json.dumps(first))
        for warning in first.get("warnings", ()):
            click.echo(f"warning: {warning}", err=True)
        outcome = {} if detach else _show_events(answers, form=form, plain=plain)
    except KeyboardInterrupt:
        _tell_how_to_go_on(job, socket)
    if "error" in outcome:
        raise click.ClickException(outcome["error"])
    if outcome:
        click.echo(json.dumps(outcome))
    return job


def _tell_how_to_go_on(job: Mapping[str, Any], socket: Path) -> NoReturn:
    """End after Ctrl-C: the job goes on."""
    if "job_id" in job:
        where = f"{job['job_id']} --socket {socket}"
        click.echo(
            f"job {job['job_id']} goes on\n"
            f"  follow it: hypha-scheduler attach {where}\n"
            f"  cancel it: hypha-scheduler cancel {where}",
            err=True,
        )
    click.get_current_context().exit(INTERRUPTED)


def _show_events(answers: Iterable[Heard], *, form: str, plain: bool) -> Mapping[str, Any]:
    """Show the events of a job until it has ended; return the scheduler's answer then, if there is one."""
    is_live = form == "text" and not plain and sys.stdout.isatty()
    outcome: Mapping[str, Any] = {}
    with _live() if is_live else nullcontext(_display_lines(form)) as show:
        for heard in answers:
            for event in heard.events:
                show(event)
            outcome = heard.answer or outcome
    return outcome


@contextmanager
def _live() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Draw a live view, if the terminal can; yield what shows an event."""
    from rich.console import Console

    from hypha_scheduler.submission.live_view import show_live

    console = Console(no_color=True if click.get_current_context().color is False else None)
    with nullcontext(_display_lines("text")) if console.is_dumb_terminal else show_live(console) as show:
        yield show


def _display_lines(form: str) -> Callable[[dict[str, Any]], None]:
    """Return what shows an event."""
    from hypha_scheduler.submission.job_view import DETAILS, JobView

    view = JobView()

    def show(event: dict[str, Any]) -> None:
        line = view.add(event)
        if form == "text" and line is not None:
            click.echo(line, err=True)
        elif form == "json" and event.get("event") not in DETAILS:
            estimate = {"cost": round(view.cost(view.at), 6), "seconds_left": view.seconds_left}
            click.echo(json.dumps(event | (estimate if event.get("event") == "round" else {})))

    return show


@click.command("jobs")
@_at_scheduler
@click.option("--all", "every", is_flag=True, help="Also jobs that have ended, the newest first, at most 1000.")
@_format_option
def list_jobs(scheduler: Path, every: bool, form: str) -> None:
    """List the jobs that wait or run, and why one waits.

    They are listed in the order in which they came; with --all those that have ended follow, and why one failed.
    Exit codes: 0, or 3 if no scheduler is running there.
    """
    answer = _ask(scheduler, command="jobs", all=every)
    for entry in answer["jobs"]:
        click.echo(json.dumps(entry) if form == "json" else _line(entry))
    if not answer["jobs"] and form == "text":
        click.echo(f"no job {'is known' if every else 'waits or runs; --all lists those that have ended'}", err=True)


def _line(entry: Mapping[str, Any]) -> str:
    """Return a job as a line."""
    submitted = entry.get("submitted")
    at = "" if submitted is None else datetime.fromtimestamp(submitted, UTC).strftime("%Y-%m-%d %H:%M")
    reason = str(entry.get("reason") or "").partition("\n")[0]
    parts = (entry["job_id"], f"{entry['state']:<11}", f"{at:<16}", entry.get("name") or "-", reason)
    return "  ".join(parts).rstrip()


@click.command()
@click.argument("job")
@_at_scheduler
@_format_option
def status(job: str, scheduler: Path, form: str) -> None:
    """Show a job's state, last round, workers and cost.

    JOB is a job's name, or the beginning of its name or id. Of a job that waits it is said why. Exit codes: 0, 2 no
    job or several are called so, 3 no scheduler is running there.
    """
    from hypha_proto.record_file import EVENTS, RecordReader
    from hypha_scheduler.submission.job_view import JobView

    entry = _ask(scheduler, command="status", id=job)["job"]
    reader, view = RecordReader(Path(entry["directory"]) / EVENTS), JobView()
    while events := reader.read():
        for event in events:
            view.add(event)
    if form == "json":
        click.echo(json.dumps(view.summary(time.time()) | entry))
        return
    click.echo(_line(entry))
    click.echo(f"  directory: {entry['directory']}")
    if view.step is not None:
        click.echo(f"  {view.describe_progress(time.time())}")
    if view.workers:
        click.echo(f"  workers: {', '.join(map(str, view.workers.values()))}")
    if view.lost or view.late:
        click.echo(f"  {view.lost} workers lost, {view.late} late rounds of workers")


@click.command()
@click.argument("job")
@_at_scheduler
@_plain_option
@_format_option
def attach(job: str, scheduler: Path, plain: bool, form: str) -> None:
    """Show what has happened in a job, and follow it to its end.

    JOB is a job's name, or the beginning of its name or id. Exit codes: 0 the job finished, 1 it failed or was
    cancelled, 2 no job or several are called so, 3 no scheduler is running there, or it was stopped before the job had
    ended, 130 Ctrl-C, after which the job goes on.
    """
    from hypha_scheduler.submission.client import attach_job

    entry = show_answers(attach_job(scheduler, job), scheduler, form=form, plain=plain)
    click.get_current_context().exit(_EXIT_CODES.get(entry["state"], 0))


@click.command()
@click.argument("job")
@click.option("--worker", metavar="NAME", help="Of this worker alone: its name, its peer id, or the end of that.")
@click.option("--follow", is_flag=True, help="Also show what is printed until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Begin with the last N lines of each worker.")
@_at_scheduler
@_format_option
def logs(job: str, worker: str | None, follow: bool, tail: int | None, scheduler: Path, form: str) -> None:
    """Show what a job's executors have printed.

    JOB is a job's name, or the beginning of its name or id. Of each worker the last MiB is read, without secrets.
    Workers keep the logs of jobs that have ended for a while, too. Exit codes: 0, 1 no worker could be asked, 2 no job
    or several are called so or it has no such worker, 3 no scheduler is running there, 130 Ctrl-C.
    """
    from hypha_proto.record_file import EVENTS, RecordReader
    from hypha_scheduler.submission.catalog import ACTIVE
    from hypha_scheduler.submission.log_client import JobLogs, last_lines

    entry = _ask(scheduler, command="status", id=job)["job"]
    found = JobLogs(scheduler, entry["job_id"], RecordReader(Path(entry["directory"]) / EVENTS), worker)
    found.find_workers()
    if worker is not None and not found.chosen and not (follow and entry["state"] in ACTIVE):
        names = ", ".join(found.workers.values()) or "none so far"
        raise click.BadParameter(f"{worker!r} is no worker of the job; its workers: {names}", param_hint="--worker")
    reported: dict[str, str] = {}
    try:
        _show_lines(last_lines(found.read(), tail), form)
        _report(found.failures, reported)
        while follow and entry["state"] in ACTIVE:
            time.sleep(_LOG_PAUSE)
            entry = _ask(scheduler, command="status", id=entry["job_id"])["job"]
            _show_lines(found.read(), form)
            _report(found.failures, reported)
    except KeyboardInterrupt:
        click.get_current_context().exit(INTERRUPTED)
    if not found.chosen:
        click.echo(f"job {entry['job_id']} has had no workers so far", err=True)
    elif len(found.failures) == len(found.chosen):
        click.get_current_context().exit(1)


def _show_lines(lines: Iterable[LogLine], form: str) -> None:
    for line in lines:
        fields = {"worker": line.worker, "peer": line.peer, "run": line.run, "line": line.text}
        click.echo(json.dumps(fields) if form == "json" else f"{line.worker}: {line.text}")


def _report(failures: Mapping[str, str], reported: dict[str, str]) -> None:
    """Say of which workers no logs can be read, each reason once."""
    for worker, reason in failures.items():
        if reported.get(worker) != reason:
            click.echo(f"worker {worker}: {reason}", err=True)
    reported.update(failures)


@click.command()
@click.argument("job")
@_at_scheduler
def cancel(job: str, scheduler: Path) -> None:
    """End a job that waits or runs.

    JOB is a job's name, or the beginning of its name or id. Its executors are stopped. What it has written so far
    stays, its last model included, and `resume` can continue it. Exit codes: 0 it has ended and its leases are
    released, 1 it had ended before or does not end in time, 2 no job or several are called so, 3 no scheduler is
    running there.
    """
    click.echo(json.dumps(_ask(scheduler, command="cancel", id=job)))


@click.command()
@_at_scheduler
@since_option
@table_format_option
def accounts(scheduler: Path, since: float, form: str) -> None:
    """Print what each lease of the scheduler's jobs has cost: job, worker, seconds, price and tokens.

    Also while no scheduler runs. The earliest lease comes first; one that the scheduler has taken back when it was
    started again has a line for each run. Exit codes: 0 printed, 1 the accounts cannot be read, 2 wrong usage.
    """
    from hypha_scheduler.jobs.lease_accounts import AccountsFileError
    from hypha_scheduler.submission.account_list import show_accounts

    try:
        click.echo(show_accounts(scheduler.parent, since, form), nl=False)
    except (OSError, AccountsFileError) as error:
        raise click.ClickException(f"the accounts cannot be read: {error}") from None


@click.command()
@click.argument("name", required=False)
@_at_scheduler
@_format_option
def nodes(name: str | None, scheduler: Path, form: str) -> None:
    """List the workers and datasets that there are.

    The workers are those that the scheduler knows, the datasets those that data nodes announce. Of each worker: when it
    was last seen, the least bid that gets an offer, in tokens per lease-hour, running tasks, free resources, executors,
    and why it makes no offers. With NAME only the worker or dataset of that name; of a worker also its peer id, or the
    end of that. Exit codes: 0, 1 the scheduler cannot say, 2 nothing has that name, 3 no scheduler is running there.
    """
    from hypha_scheduler.submission.node_list import find_named, nearest_name, render_nodes

    found = _ask(scheduler, command="nodes")
    if name is not None:
        known, found = found, find_named(found, name)
        if not found:
            raise click.BadParameter(f"no worker or dataset is called {name!r}{nearest_name(known, name)}")
    if form == "json":
        for kind in ("worker", "dataset"):
            for entry in found.get(f"{kind}s", ()):
                click.echo(json.dumps({kind: entry}))
    else:
        click.echo(render_nodes(found, time.time()), nl=False)


def find_directory(wanted: str, runs: Path) -> Path:
    """Return the directory of a job that is named by it, by the job's name, or by the beginning of its name or id.

    The scheduler that writes to `runs` is asked if it runs.

    Raises:
        click.ClickException: there is none, or there are several.
    """
    from hypha_scheduler.submission.catalog import ACTIVE, find_jobs
    from hypha_scheduler.submission.client import JobCommandError, NoSchedulerError, send_command, socket_path

    if Path(wanted).is_dir():
        return Path(wanted)
    try:
        entry = send_command(socket_path(runs), {"command": "status", "id": wanted})["job"]
        if entry["state"] in ACTIVE:
            text = f"job {entry['job_id']} is {entry['state']} already; follow it with `hypha-scheduler attach`"
            raise click.UsageError(text)
        return Path(entry["directory"])
    except JobCommandError as error:
        _refuse(error)
    except NoSchedulerError:
        found = find_jobs(runs, {}, wanted)
    if len(found) == 1:
        return Path(found[0].directory)
    from msgspec import to_builtins

    text = f"{len(found) or 'no'} jobs in {runs} have a name or an id that begins with {wanted!r}"
    raise _NoSuchJobError("\n".join([text, *(f"  {_line(to_builtins(entry))}" for entry in found)]))
