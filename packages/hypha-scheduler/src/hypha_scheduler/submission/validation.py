"""Validation of a submitted job: everything that is wrong with it at once, with the nearest names of unknown keys.

The errors are those of a configuration file (`hypha_net.node.config.errors`).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hypha_net.node.config.errors import validation_problems
from hypha_scheduler.jobs.config import JobTable, PreprocessorTable, StartModelTable
from hypha_scheduler.jobs.model_files import missing_files
from hypha_scheduler.strategies.registry import DEFAULT_TYPE, load_strategy, parse_job


def validate_job(job: dict[str, Any], strategies: Collection[str] | None = None) -> JobTable:
    """Validate a job's table and the local files that it names.

    Args:
        job: the table.
        strategies: types that may be loaded; all that are installed if None.

    Raises:
        ValueError: the job is invalid; the message lists every problem, one or two lines each.
    """
    try:
        valid = parse_job(job, strategies)
    except ValidationError as error:
        model = load_strategy(job.get("type", DEFAULT_TYPE), strategies).job_table
        problems = validation_problems(model, error, job, lambda _key: "job", variables=False)
        lines = [str(replace(problem, where="")) for problem in problems]
        raise ValueError("\n".join(lines + _missing_files_of_tables(job))) from None
    if lines := valid.missing_files():
        raise ValueError("\n".join(lines))
    return valid


def _missing_files_of_tables(job: dict[str, Any]) -> list[str]:
    """Return what the tables that are valid by themselves lack."""
    lines = []
    with suppress(ValidationError):  # which is among the problems of the job
        lines += missing_files(StartModelTable.model_validate(job.get("model")))
    with suppress(ValidationError):
        lines += missing_files(PreprocessorTable.model_validate(job.get("preprocessor")))
    return lines
