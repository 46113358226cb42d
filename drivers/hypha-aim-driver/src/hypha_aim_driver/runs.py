"""Runs: assigns metrics to runs, with one run per job, one context per worker, and the round as the step.

Writes through `repository`. A job is identified by its ``job_id``. Some schedulers do not send it; then a run lasts
until a worker reports an earlier round, which means that a new job began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hypha_aim_driver.app import AimMetrics

if TYPE_CHECKING:
    from hypha_aim_driver.repository import AimRepository, AimRun

_UNNAMED: Final = ""
_IDLE_TIMEOUT: Final = 600.0
"""Seconds without a metric after which a job's run is closed and AIM shows it as finished; a metric reopens it."""


class JobRuns:
    """Writes to the runs of a repository; called only by the thread of `retry_queue`."""

    def __init__(self, repository: AimRepository, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `repository`; opens nothing yet."""
        self._repository = repository
        self._clock = clock
        self._open: dict[str, AimRun] = {}
        self._used_at: dict[str, float] = {}
        self._rounds: dict[tuple[str, str], int] = {}
        """Last round of each worker and metric of the job without an id."""

    def write(self, metrics: Sequence[AimMetrics]) -> int:
        """Write at least the first of `metrics` and return how many were written; idempotent.

        Stops where a job without an id ends, so that a retry writes to the same run.

        Raises:
            NotWrittenError: some metrics may not have been written.
        """
        if self._starts_new_job(metrics[0], self._rounds):
            self._close_run(_UNNAMED)
            self._rounds = {}
        rounds, touched, count = dict(self._rounds), set(), 0
        for metric in metrics:
            if self._starts_new_job(metric, rounds):
                break
            if metric.job_id is None:
                rounds[metric.worker_id, metric.metric_name] = metric.round
            run = self._run(metric.job_id)
            run.track(metric.value, name=metric.metric_name, step=metric.round, worker=metric.worker_id)
            touched.add(metric.job_id or _UNNAMED)
            count += 1
        for key in touched:
            self._open[key].confirm()
        self._rounds = rounds
        return count

    @staticmethod
    def _starts_new_job(metric: AimMetrics, rounds: dict[tuple[str, str], int]) -> bool:
        """Return whether a worker reports an earlier round without a job id."""
        return metric.job_id is None and metric.round < rounds.get((metric.worker_id, metric.metric_name), 0)

    def _run(self, job_id: str | None) -> AimRun:
        key = job_id or _UNNAMED
        if key not in self._open:
            self._open[key] = self._repository.open(job_id)
        self._used_at[key] = self._clock()
        return self._open[key]

    def _close_run(self, key: str) -> None:
        if key in self._open:
            self._open[key].close()
            del self._open[key], self._used_at[key]

    def on_idle(self) -> None:
        """Close the runs of jobs without recent metrics."""
        for key in [key for key in self._open if self._clock() - self._used_at[key] > _IDLE_TIMEOUT]:
            self._close_run(key)

    def close(self) -> None:
        """Close all runs; no more metrics follow."""
        for key in list(self._open):
            self._close_run(key)
