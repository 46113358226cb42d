"""The other end of `submissions`: reads a job's TOML and hands it to a running scheduler."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_CONNECT_TIMEOUT: Final = 5.0
_TABLES_WITH_PATHS: Final = ("model", "preprocessor")


class JobFileError(Exception):
    """The TOML file holds no job that can be handed in."""


class NoSchedulerError(Exception):
    """No scheduler takes jobs there."""


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobFileError(f"{file}: {error}") from None


def _scheduler_table(plain: dict[str, Any]) -> dict[str, Any]:
    table = plain.get("scheduler")
    return table if isinstance(table, dict) else {}


def read_job(file: Path) -> dict[str, Any]:
    """The job in a TOML file: its ``[scheduler.job]`` table, or the whole file. Paths in it become absolute.

    Raises:
        JobFileError: the file cannot be read, or is not TOML.
    """
    plain = _read_toml(file)
    job = _scheduler_table(plain).get("job", plain)
    if not isinstance(job, dict):
        raise JobFileError(f"{file}: scheduler.job is not a table")
    for key in _TABLES_WITH_PATHS:
        table = job.get(key)
        if isinstance(table, dict) and isinstance(table.get("path"), str):
            table["path"] = str((file.parent / table["path"]).resolve())
    return job


def configured_socket(config: Path | None) -> Path:
    """Where the scheduler with this configuration file takes jobs; without an output_dir in it, in ``runs`` here.

    Raises:
        JobFileError: there is no such file, or it cannot be read.
    """
    from hypha_scheduler.submission.server import socket_path

    if config is None:
        raise JobFileError("name the scheduler: --socket PATH, or --config with its configuration file")
    plain = _read_toml(config)
    runs = _scheduler_table(plain).get("output_dir") or plain.get("output_dir")
    if runs is None:  # the default stands in no file: it counts from where the scheduler was started
        return socket_path(Path("runs"))
    return socket_path(config.parent / str(runs))


def submit_job(path: Path, job: dict[str, Any], *, detach: bool) -> Iterator[dict[str, Any]]:
    """Hand a job in; yields the scheduler's answers, the last one when the job has ended.

    Raises:
        NoSchedulerError: nobody listens at `path`, or the scheduler ended before the job did.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_TIMEOUT)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"job": job}, default=str).encode())  # TOML has dates: as they are written
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            remedy = "one that runs without a job in its configuration does"
            raise NoSchedulerError(f"no scheduler takes jobs at {path}: {error.strerror or error}; {remedy}") from None
        connection.settimeout(None)
        with connection.makefile("rb") as answers:
            for line in answers:
                answer: dict[str, Any] = json.loads(line)
                yield answer
                if detach or "error" in answer or "result" in answer:
                    return
    raise NoSchedulerError("the scheduler ended before the job did")
