"""Errors of jobs, with messages for the job's owner."""

from __future__ import annotations


class JobFailedError(Exception):
    """Failure of a job; the message gives the reason and, where there is one, the remedy."""


class AllocationError(JobFailedError):
    """Too few workers were found in time."""


class StrategyError(Exception):
    """No strategy for a type of job, or one that cannot be loaded."""
