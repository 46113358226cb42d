"""Submission client: reads a job's TOML or JSON file, submits it to a running scheduler and follows the job.

The client runs on the scheduler's machine, since it speaks to a Unix socket, and reads the events from the job's
directory.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypha_net.local_socket import send_request
from hypha_proto.codec import check_depth, parse_json
from hypha_proto.record_file import EVENTS, RecordReader
from hypha_scheduler.submission.catalog import ACTIVE

SOCKET_NAME: Final = "scheduler.sock"
_ANSWER_TIMEOUT: Final = 60.0
"""Seconds for the first answer: the look for datasets takes 8, and the end of a cancelled job 10."""
_INTERVAL: Final = 0.5
"""Seconds between two looks at a job's events."""
_PART: Final = 1 << 16
TASKS: Final = "tasks"
"""Type of the jobs that may be given as a list of tasks."""
_TABLES_WITH_PATHS: Final = ("model", "preprocessor", "dataset")
_PATHS: Final = ("path", "config")


class JobFileError(Exception):
    """The file cannot be read or contains no valid job."""


class NoSchedulerError(Exception):
    """No scheduler accepts jobs at the socket."""


class JobCommandError(Exception):
    """A command about a job cannot be carried out."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        """Take the scheduler's answer: ``error``, ``code`` and, if it is ambiguous, ``matches``."""
        super().__init__(str(answer["error"]))
        self.code = str(answer.get("code", ""))
        self.matches: list[dict[str, Any]] = list(answer.get("matches", ()))


class SchedulerEndedError(NoSchedulerError):
    """The scheduler ended before the job did."""


class Heard(NamedTuple):
    """What is new of a job: an answer of its scheduler, or events; neither if nothing has happened for a while."""

    answer: dict[str, Any] | None
    events: list[dict[str, Any]]


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        plain = tomllib.loads(file.read_text(encoding="utf-8"))
        check_depth(plain)
        return plain
    except (OSError, ValueError) as error:
        raise JobFileError(f"{file}: {error}") from None
    except RecursionError:
        raise JobFileError(f"{file}: values are nested too deeply") from None


def _scheduler_table(plain: dict[str, Any]) -> dict[str, Any]:
    table = plain.get("scheduler")
    return table if isinstance(table, dict) else {}


def _read_json(file: Path) -> dict[str, Any]:
    """Read a job from a JSON file: the job, a list of task objects, or one task object."""
    try:
        plain = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise JobFileError(f"{file}: {error}") from None
    if isinstance(plain, list):
        return {"type": TASKS, "tasks": plain}
    if not isinstance(plain, dict):
        raise JobFileError(f"{file}: expected a job, a list of tasks or a task, not {type(plain).__name__}")
    if "driver" in plain and "tasks" not in plain:
        return {"type": TASKS, "tasks": [plain]}
    return {"type": TASKS, **plain} if "tasks" in plain else plain


def read_job(file: Path) -> dict[str, Any]:
    """Read a job from a file; paths are made absolute.

    A TOML file has it in its ``[scheduler.job]`` table or is the job. A JSON file, whose name ends in ``.json``, is the
    job, the list of its tasks, or its only task.

    Raises:
        JobFileError: the file cannot be read or is not valid TOML or JSON.
    """
    if file.suffix.lower() == ".json":
        job = _read_json(file)
    else:
        plain = _read_toml(file)
        job = _scheduler_table(plain).get("job", plain)
    if not isinstance(job, dict):
        raise JobFileError(f"{file}: scheduler.job is not a table")
    for key in _TABLES_WITH_PATHS:
        table = job.get(key)
        for name in _PATHS:
            if isinstance(table, dict) and isinstance(table.get(name), str):
                table[name] = str((file.parent / table[name]).resolve())
    return job


def socket_path(runs: Path) -> Path:
    """Return the socket at which a scheduler that writes to `runs` accepts jobs."""
    return runs / SOCKET_NAME


def configured_socket(config: Path | None) -> Path:
    """Return the socket of the scheduler with this configuration; without an output_dir in it, the one in ``./runs``.

    Raises:
        JobFileError: `config` is None or the file cannot be read.
    """
    if config is None:
        raise JobFileError("name the scheduler: --socket PATH, or --config with its configuration file")
    plain = _read_toml(config)
    runs = _scheduler_table(plain).get("output_dir") or plain.get("output_dir")
    if runs is None:  # the default is relative to the directory in which the scheduler was started
        return socket_path(Path("runs"))
    return socket_path(config.parent / str(runs))


def submit_job(path: Path, job: dict[str, Any], *, detach: bool, wait: bool = False) -> Iterator[Heard]:
    """Submit a job and yield the scheduler's answers, the last one when the job has ended, and its events between them.

    Args:
        path: socket of the scheduler.
        job: the job's table.
        detach: stop after the first answer.
        wait: whether the job waits for its turn and for workers.

    Raises:
        NoSchedulerError: no scheduler listens at `path`, or it ended before the job did.
    """
    return _converse(path, {"job": job} | ({"wait": True} if wait else {}), detach=detach)


def attach_job(path: Path, wanted: str) -> Iterator[Heard]:
    """Yield ``{"job": …}`` for the job of a name or id, its events, and how it ended if it had not.

    Raises:
        JobCommandError: there is no such job, or several.
        NoSchedulerError: no scheduler listens at `path`.
        SchedulerEndedError: it ended before the job did.
    """
    heard = _converse(path, {"command": "attach", "id": wanted}, detach=False)
    yield Heard(_checked(next(heard)), [])
    yield from heard


def send_command(path: Path, command: Mapping[str, Any]) -> dict[str, Any]:
    """Send a command about jobs to a running scheduler; return its answer.

    Raises:
        JobCommandError: it cannot be carried out.
        NoSchedulerError: no scheduler listens at `path`.
    """
    return _checked(next(_converse(path, command, detach=True)))


def _checked(heard: Heard) -> dict[str, Any]:
    answer = heard.answer or {}
    if "error" in answer:
        raise JobCommandError(answer)
    return answer


def resume_job(path: Path, directory: Path, job: dict[str, Any], *, detach: bool) -> Iterator[Heard]:
    """Let a running scheduler resume the job in `directory`; see `submit_job`. `job` is its table with all secrets.

    Raises:
        NoSchedulerError: no scheduler listens at `path`.
        SchedulerEndedError: it ended before the job did.
    """
    events = directory / EVENTS
    position = events.stat().st_size if events.exists() else 0
    return _converse(path, {"resume": str(directory), "job": job}, detach=detach, position=position)


def _converse(path: Path, request: Mapping[str, Any], *, detach: bool, position: int = 0) -> Iterator[Heard]:
    """Send a request; yield the answers, and the events after `position` of the job that the first one names."""
    with connect(path, request) as connection:
        connection.settimeout(_ANSWER_TIMEOUT)
        answers = _answers(connection)
        accepted = next(answers, {})
        if accepted is None:
            raise NoSchedulerError(f"the scheduler does not answer within {_ANSWER_TIMEOUT:g} s; look at its log")
        if not accepted:
            text = "the scheduler ended before it accepted the job; start it and submit the job again"
            raise SchedulerEndedError(text)
        yield Heard(accepted, [])
        if detach or "error" in accepted:
            return
        yield from _follow(connection, answers, accepted.get("job", accepted), position)


def _follow(
    connection: socket.socket, answers: Iterator[dict[str, Any] | None], job: Mapping[str, Any], position: int
) -> Iterator[Heard]:
    """Yield the events of a job until it has ended, and how it ended if it had not before."""
    reader = RecordReader(Path(job["directory"]) / EVENTS, position)
    connection.settimeout(_INTERVAL)
    for answer in answers:
        yield from _read_all(reader)
        if answer is not None and "interrupted" in answer:
            raise SchedulerEndedError(f"job {job['job_id']} was interrupted: {answer['interrupted']}")
        yield Heard(answer, [])
        if answer is not None:
            return
    yield from _read_all(reader)
    if job.get("state", "running") in ACTIVE:
        raise SchedulerEndedError(
            f"the scheduler ended before job {job['job_id']} did; continue it with `hypha-scheduler resume "
            f"{job['directory']} --config FILE`, or start the scheduler and submit the job again"
        )


def _read_all(reader: RecordReader) -> Iterator[Heard]:
    while events := reader.read():
        yield Heard(None, events)


def connect(path: Path, request: Mapping[str, Any]) -> socket.socket:
    """Connect to a running scheduler, and send it a request.

    Raises:
        NoSchedulerError: no scheduler listens at `path`.
    """
    try:
        return send_request(path, request)
    except OSError as error:
        remedy = "start one whose configuration contains no job"
        raise NoSchedulerError(f"no scheduler takes jobs at {path}: {error.strerror or error}; {remedy}") from None


def _answers(connection: socket.socket) -> Iterator[dict[str, Any] | None]:
    """Yield the scheduler's answers until it closes the connection or is killed; None after each timeout."""
    rest = b""
    with suppress(ConnectionError):
        while True:
            try:
                data = connection.recv(_PART)
            except TimeoutError:
                yield None
                continue
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(parse_json, lines)
