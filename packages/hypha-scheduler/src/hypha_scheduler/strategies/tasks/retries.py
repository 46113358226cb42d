"""Retries of tasks: whether another attempt follows one that has failed or was lost, or the job fails. Pure.

An attempt that fails counts against the `retries` of its task. One that ends with its lease, or that its worker gives
back, does not, and one that lacks a result does not either; `LOST_TASK` bounds these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hypha_net.retries import RetryPolicy
from hypha_scheduler.strategies.tasks.graph import Key, Result
from hypha_scheduler.strategies.tasks.instances import Instance

LOST_TASK: Final = RetryPolicy("a task, or its output, was lost with its worker", (0.0,) * 10)
FIRST_PAUSE: Final = 0.5
"""Seconds before the attempt that follows the first loss; doubled with each further one."""
_MAX_PAUSE: Final = 30.0
_SHOWN_LINES: Final = 10


def count_failure(
    instance: Instance, reason: str, last_lines: Sequence[str], *, may_be_workers: bool = False
) -> str | None:
    """Count a failed attempt; return why the job fails, or None if another attempt follows.

    It gets one more attempt than its `retries` if the failures `may_be_workers`.
    """
    instance.failures += 1
    if may_be_workers or not instance.has_used_retries:
        return None
    lines = "; ".join(last_lines[-_SHOWN_LINES:])
    attempts = "1 attempt" if instance.failures == 1 else f"{instance.failures} attempts"
    text = f"task {instance.name} failed after {attempts}: {reason}"
    return f"{text}; last lines: {lines}" if lines else text


def count_loss(instance: Instance, reason: str) -> str | None:
    """Count an attempt that ended with its lease, or was given back; return why the job fails."""
    instance.losses += 1
    if instance.losses <= LOST_TASK.times:
        return None
    text = f"task {instance.name} was lost {instance.losses} times, the last time because {reason}"
    return f"{text}; look whether it ends its workers"


def count_lack(instance: Instance, result: Result, reason: str) -> str | None:
    """Count an attempt that could not be given a result; return why the job fails."""
    instance.lacks += 1
    if instance.lacks <= LOST_TASK.times:
        return None
    text = f"task {instance.name} could not be given {result[1]} of {result[0]} {instance.lacks} times"
    return f"{text}, the last time because {reason}"


def count_lost_output(losses: Counter[Key], key: Key, reason: str) -> str | None:
    """Count the loss of an output; return why the job fails, or None if it is made again."""
    losses[key] += 1
    if losses[key] <= LOST_TASK.times:
        return None
    return f"output {key[1]} of task {key[0]} was lost {losses[key]} times: {reason}"


def pause_after(losses: int) -> float:
    """Return the seconds until the attempt that follows so many losses may start."""
    return min(FIRST_PAUSE * 2.0 ** (losses - 1), _MAX_PAUSE)
