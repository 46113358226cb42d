"""Validation of a submitted job: everything that is wrong with it at once, with the nearest names of unknown keys.

The errors are those of a configuration file (`hypha_net.node.config.errors`). Called by `server`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hypha_net.node.config.errors import validation_problems
from hypha_scheduler.job_config import JobConfig, ModelTable, PreprocessorTable
from hypha_scheduler.model_files import missing_files


def validate_job(job: dict[str, Any]) -> JobConfig:
    """Validate a job's table and the local files that it names.

    Raises:
        ValueError: the job is invalid; the message lists every problem, one or two lines each.
    """
    try:
        valid = JobConfig.model_validate(job)
    except ValidationError as error:
        problems = validation_problems(JobConfig, error, job, lambda _key: "job", variables=False)
        lines = [str(replace(problem, where="")) for problem in problems]
        raise ValueError("\n".join(lines + _missing_files_of_tables(job))) from None
    if lines := missing_files(valid.model, valid.preprocessor):
        raise ValueError("\n".join(lines))
    return valid


def _missing_files_of_tables(job: dict[str, Any]) -> list[str]:
    """Return what the tables that are valid by themselves lack."""
    lines = []
    with suppress(ValidationError):  # which is among the problems of the job
        lines += missing_files(ModelTable.model_validate(job.get("model")))
    with suppress(ValidationError):
        lines += missing_files(None, PreprocessorTable.model_validate(job.get("preprocessor")))
    return lines
