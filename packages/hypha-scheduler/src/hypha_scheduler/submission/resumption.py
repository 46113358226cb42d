"""Resuming an interrupted or failed job: which job a directory holds, and whether it can go on.

The job's table is the one that the journal has accepted. Its secrets are masked there, so that they come from a job in
the configuration, which must be the same job; only its ``resources``, ``budget`` and ``inference.max_error_share`` may
differ, and are used. Nothing is written.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr, ValidationError

from hypha_net.node.config.introspection import dotted, leaves
from hypha_proto.texts import quote
from hypha_scheduler.errors import JobFailedError, JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.unfinished import UnfinishedJob, find_unfinished, log_unfinished, read_resumable
from hypha_scheduler.strategies.registry import parse_job
from hypha_scheduler.submission.catalog import read_entry

_log = logging.getLogger(__name__)

_LEASE_MARGIN: Final = 15.0
"""Seconds by which the leases of a job may outlive the grace: the last renewal was before the last mark."""
_LONGEST_GRACE: Final = 31 * 86400.0
"""Journals that are older are not read: no grace is longer."""
_MASK: Final = str(SecretStr("x"))
"""What the journal has in place of a secret."""
_CHANGEABLE: Final = frozenset({"name", "resources", "budget", "inference.max_error_share"})
"""Keys or tables that may differ when a job is resumed: they do not say what is computed."""


@dataclass(frozen=True, slots=True)
class ResumableJob:
    """A job that can go on."""

    job_id: uuid.UUID
    job: JobTable
    directory: Path
    submitted_at: float = 0.0
    """Seconds since the Unix epoch; 0 if its events do not say."""


def find_jobs_to_take_up(
    runs: Path, configured: Sequence[JobTable], strategies: Collection[str] | None, now: float
) -> list[ResumableJob]:
    """Return the unfinished jobs whose workers may still hold their leases; log the others, and why.

    Args:
        runs: output directory of this scheduler.
        configured: its jobs, one of which may have a job's secrets.
        strategies: types that may be loaded; all that are installed if None.
        now: seconds since the Unix epoch.
    """

    def to_take_up(unfinished: UnfinishedJob) -> ResumableJob | None:
        """Return a job if its tasks may still run and nothing speaks against going on with it."""
        age = max(0.0, now - unfinished.last_record)
        if unfinished.was_stopped or age > _LONGEST_GRACE + _LEASE_MARGIN:
            return None
        try:
            found = find_resumable(unfinished.directory, runs, configured, strategies, others_allowed=True)
        except JobRefusedError as error:
            _log.info("a job is not taken up: %s", error)
            return None
        grace = found.job.orphan_grace_seconds
        return found if grace > 0 and age <= grace + _LEASE_MARGIN else None

    try:
        unfinished = find_unfinished(runs)
    except OSError as error:
        _log.warning("cannot look for unfinished jobs: %s", error)
        return []
    found = {job.directory: to_take_up(job) for job in unfinished}
    log_unfinished([job for job in unfinished if found[job.directory] is None], runs)
    return [job for job in found.values() if job is not None]


def find_resumable(
    directory: Path,
    runs: Path,
    configured: Sequence[JobTable],
    strategies: Collection[str] | None = None,
    *,
    others_allowed: bool = False,
) -> ResumableJob:
    """Return the job in a directory.

    Args:
        directory: the job's directory.
        runs: output directory of the scheduler that is to run it.
        configured: jobs of the configuration, one of which may have the job's secrets.
        strategies: types that may be loaded; all that are installed if None.
        others_allowed: whether the configuration may have other jobs of its type.

    Raises:
        JobRefusedError: it cannot be resumed.
    """
    directory = directory.resolve()
    if directory.parent != runs.resolve():
        raise JobRefusedError(
            f"{directory}: it is not in {runs.resolve()}, the output_dir of this scheduler; name the configuration of "
            "the scheduler that began the job"
        )
    try:
        records = read_resumable(directory)
        job_id = uuid.UUID(str(records[0].get("job_id")))
    except (OSError, JobFailedError) as error:
        raise JobRefusedError(str(error)) from None
    except ValueError:
        raise JobRefusedError(f"{directory}: the first record of its journal names no job_id") from None
    if str(job_id) != directory.name:
        raise JobRefusedError(f"{directory}: its journal is of job {job_id}; give the directory that name again")
    recorded = _recorded_job(directory, records[0]["job"], strategies)
    entry = read_entry(directory)
    return ResumableJob(
        job_id,
        _with_secrets(directory, recorded, configured, others_allowed),
        directory,
        (entry and entry.submitted) or 0.0,
    )


def _recorded_job(directory: Path, table: dict[str, Any], strategies: Collection[str] | None) -> JobTable:
    try:
        return parse_job(table, strategies)
    except ValueError as error:
        problems = [str(error)]
        if isinstance(error, ValidationError):
            details = error.errors(include_url=False)
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details]
        what = "; ".join(problems)
        remedy = "resume it with the version of hypha-scheduler that began it"
        raise JobRefusedError(
            f"{directory}: this version does not know the job in its journal: {what}; {remedy}"
        ) from None


def _with_secrets(
    directory: Path, recorded: JobTable, configured: Sequence[JobTable], others_allowed: bool
) -> JobTable:
    """Return the job with the secrets, and the resources, of the configured job that it is.

    Raises:
        JobRefusedError: the configuration has another job of its type, or a secret is missing.
    """
    others = {id(job): differences(recorded, job) for job in configured if job.type == recorded.type}
    same = next((job for job in configured if others.get(id(job)) == []), None)
    if same is not None:
        return same
    if others and not others_allowed:
        lines = min(others.values(), key=len)
        remedy = "name a configuration with the job as it was, or without one"
        raise JobRefusedError("\n".join([f"{directory}: the configuration has another job; {remedy}:", *lines]))
    if lacking := sorted(_masked(recorded)):
        raise JobRefusedError(
            f"{directory}: {', '.join(lacking)}: the journal keeps no secrets; put the job with them into "
            "[scheduler.job] of the --config file"
        )
    return recorded


def differences(recorded: JobTable, configured: JobTable) -> list[str]:
    """Return how a configured job differs from a recorded one, one line a key."""
    was, found = (
        {dotted(at): value for at, value in leaves(job.model_dump(mode="json"))} for job in (recorded, configured)
    )
    keys = [key for key in dict.fromkeys([*was, *found]) if not {key, key.split(".")[0]} & _CHANGEABLE]
    return [
        f"{key} is {_shown(found.get(key))}, and was {_shown(was.get(key))}"
        for key in keys
        if was.get(key) != found.get(key)
    ]


def _shown(value: object) -> str:
    return "unset" if value is None else quote(value)


def _masked(job: JobTable) -> Iterator[str]:
    """Yield the dotted keys of secrets that are masked."""
    for at, value in leaves(job.model_dump()):
        if isinstance(value, SecretStr) and value.get_secret_value() == _MASK:
            yield dotted(at)


def revealed(job: JobTable) -> dict[str, Any]:
    """Return a job's table as plain values with its secrets, for a socket that only its owner can open."""
    plain: dict[str, Any] = json.loads(json.dumps(job.model_dump(), default=_reveal))
    return plain


def _reveal(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
