"""Which run a metric belongs to: one run a job, one context a worker, the round as the step.

Between `delivery`, which calls `JobRuns.write` from its thread, and `repository`, which is AIM. A job is known by its
``job_id``. Some schedulers do not name it: then a run lasts until a worker goes back to an earlier round, which only a
new job does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hypha_aim_driver.app import AimMetrics

_UNNAMED: Final = ""
_IDLE: Final = 600.0
"""Seconds without a post after which a job's run is closed; AIM shows it as finished then. A post opens it again."""


class Run(Protocol):
    """One job's run. Every method raises `NotWrittenError` when AIM fails."""

    def track(self, value: float, *, name: str, step: int, worker: str) -> None:
        """Write one value; the same name, step and worker again overwrites it."""
        ...

    def confirm(self) -> None:
        """Return when everything tracked has arrived."""
        ...

    def close(self) -> None:
        """Mark the run as ended."""
        ...


class Repository(Protocol):
    """Where runs live."""

    def open(self, job_id: str | None) -> Run:
        """The run of a job: the one that it has already, or a new one; always a new one without a job id.

        Raises:
            NotWrittenError: AIM fails.
        """
        ...


@dataclass(slots=True)
class _Open:
    run: Run
    used_at: float


class JobRuns:
    """A `Writer` into the runs of a repository."""

    def __init__(self, repository: Repository, clock: Callable[[], float] = time.monotonic) -> None:
        """Open nothing yet."""
        self._repository = repository
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._rounds: dict[tuple[str, str], int] = {}
        """Of the unnamed job: the last round of each worker and metric."""

    def write(self, metrics: Sequence[AimMetrics]) -> int:
        """See `Writer.write`; stops where an unnamed job ends, so that what is repeated stays in its run."""
        if self._begins_anew(metrics[0], self._rounds):
            self._end(_UNNAMED)
            self._rounds = {}
        rounds, touched, count = dict(self._rounds), set(), 0
        for metric in metrics:
            if self._begins_anew(metric, rounds):
                break
            if metric.job_id is None:
                rounds[metric.worker_id, metric.metric_name] = metric.round
            run = self._run(metric.job_id)
            run.track(metric.value, name=metric.metric_name, step=metric.round, worker=metric.worker_id)
            touched.add(metric.job_id or _UNNAMED)
            count += 1
        for key in touched:
            self._open[key].run.confirm()
        self._rounds = rounds
        return count

    @staticmethod
    def _begins_anew(metric: AimMetrics, rounds: dict[tuple[str, str], int]) -> bool:
        """Whether a worker goes back in an unnamed job."""
        return metric.job_id is None and metric.round < rounds.get((metric.worker_id, metric.metric_name), 0)

    def _run(self, job_id: str | None) -> Run:
        key = job_id or _UNNAMED
        if key not in self._open:
            self._open[key] = _Open(self._repository.open(job_id), 0.0)
        self._open[key].used_at = self._clock()
        return self._open[key].run

    def _end(self, key: str) -> None:
        if key in self._open:
            self._open[key].run.close()
            del self._open[key]

    def rest(self) -> None:
        """See `Writer.rest`: runs of jobs that say nothing any more end."""
        for key in [key for key, run in self._open.items() if self._clock() - run.used_at > _IDLE]:
            self._end(key)

    def close(self) -> None:
        """See `Writer.close`."""
        for key in list(self._open):
            self._end(key)
