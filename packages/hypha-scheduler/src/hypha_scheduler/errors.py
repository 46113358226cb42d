"""What can go wrong with a job, in words for its owner."""

from __future__ import annotations


class JobFailedError(Exception):
    """The job cannot go on; the message says why and, where there is one, what to do."""


class AllocationError(JobFailedError):
    """Not enough workers were found in time."""
