"""State of a job's live view: progress of any kind of job, last losses, and a row for each worker.

Pure: built from the events that `job_view` folds; `live_view` renders it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hypha_proto.ids import describe_peer
from hypha_scheduler.submission.job_view import JobView

_LOSSES: Final = 40
_MAX_ROWS: Final = 256
"""Workers that are remembered; of more, those that have left go first, then the oldest."""
_MAX_TEXT: Final = 200
_GONE: Final = {
    "worker_lost": "lost",
    "worker_left": "left",
    "worker_replaced": "replaced",
    "worker_excluded": "excluded",
}
_LATE: Final = frozenset({"worker_late", "worker_suspected"})
_MEASURED: Final = frozenset({"samples", "batches", "samples_per_second"})
_DOING: Final = {
    "lease_draining": "drains",
    "worker_joined": "works",
    "worker_suspected": "suspected",
    "worker_late": "late",
    "worker_restarted": "restarted",
    **_GONE,
}


@dataclass(slots=True)
class WorkerRow:
    """What a worker does."""

    name: str
    role: str
    price: float
    doing: str = "placed"
    is_gone: bool = False
    """Whether it works on the job no more."""
    is_late: bool = False
    """Whether it is late, or suspected to be."""
    measured: dict[str, float] = field(default_factory=dict)
    """Its metrics over its last round."""

    @property
    def samples_per_second(self) -> float | None:
        """Samples that it trains a second."""
        return self.measured.get("samples_per_second")

    @property
    def batch_size(self) -> float | None:
        """Mean over the batches of its last round."""
        batches, samples = self.measured.get("batches"), self.measured.get("samples")
        return samples / batches if batches and samples is not None else None


@dataclass(slots=True)
class LiveState:
    """What the live view shows, after the events that it was told."""

    view: JobView = field(default_factory=JobView)
    rows: dict[str, WorkerRow] = field(default_factory=dict)
    """By peer id, also of workers that have left."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    is_paused: bool = False
    parts: tuple[int, int] | None = None
    """Slices with results, of all slices, in an inference job."""
    data_rows: tuple[int, int] | None = None
    """Rows with results that were reported, of all rows, in an inference job."""
    tasks: int = 0
    """Attempts at tasks that have finished."""
    _began: tuple[float, int] | None = None
    """Time of the first result of this run, and the slices done then."""

    def add(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; return a line for it if it is to be shown."""
        line = self.view.add(event)
        self._take(str(event.get("event")), event)
        return line

    def _take(self, kind: str, event: Mapping[str, Any]) -> None:
        peer = str(event.get("worker") or event.get("peer"))
        if kind in ("placement", "lease_added", "resumed", "accepted"):
            self._seat_workers(is_new=kind in ("resumed", "accepted"))
        elif kind == "round":
            self._end_step(event)
        elif kind == "metric":
            self._measure(peer, event)
        elif kind in ("slices", "part"):
            self._count_parts(kind, event)
        elif kind == "task_ended":
            self.tasks += event.get("outcome") == "finished"
            self._do(peer, "idle")
        elif kind == "task_started":
            self._do(peer, str(event.get("task"))[:_MAX_TEXT])
        elif kind in _DOING:
            self._do(peer, _DOING[kind], is_gone=kind in _GONE, is_late=kind in _LATE)
        self.is_paused = kind == "paused" if kind in ("paused", "continued", "resumed", "accepted") else self.is_paused

    def _seat_workers(self, *, is_new: bool) -> None:
        if is_new:
            self.rows.clear()
            self._began = None
        for peer, worker in self.view.workers.items():
            if peer not in self.rows or self.rows[peer].is_gone:
                self.rows[peer] = WorkerRow(describe_peer(peer, worker.name), worker.role[:_MAX_TEXT], worker.price)
        while len(self.rows) > _MAX_ROWS:
            del self.rows[next((peer for peer, row in self.rows.items() if row.is_gone), next(iter(self.rows)))]

    def _do(self, peer: str, doing: str, *, is_gone: bool = False, is_late: bool = False) -> None:
        if (row := self.rows.get(peer)) is not None:
            row.doing, row.is_gone, row.is_late = doing, is_gone, is_late

    def _end_step(self, event: Mapping[str, Any]) -> None:
        if self.view.loss is not None and math.isfinite(self.view.loss):
            self.losses.append(self.view.loss)
        counts = event.get("counts")
        for peer in counts if isinstance(counts, Mapping) else ():
            self._do(peer, "works")

    def _measure(self, peer: str, event: Mapping[str, Any]) -> None:
        name, value, row = event.get("name"), event.get("value"), self.rows.get(peer)
        if row is not None and name in _MEASURED and isinstance(value, int | float) and math.isfinite(value):
            row.measured[str(name)] = value

    def _count_parts(self, kind: str, event: Mapping[str, Any]) -> None:
        done, planned, rows = (event.get(key) for key in ("committed", "slices", "rows"))
        if not (isinstance(done, int) and isinstance(planned, int)):
            return
        self.parts = (done, planned)
        if kind == "slices":
            self._began = (self.view.at, done)
            # of a resumed job it is not known how many rows were done
            self.data_rows = (0, rows) if isinstance(rows, int) and done == 0 else None
        elif isinstance(rows, int) and self.data_rows is not None:
            self.data_rows = (self.data_rows[0] + rows, self.data_rows[1])
            self._do(str(event.get("worker")), "works")

    @property
    def progress(self) -> tuple[int, int | None, str] | None:
        """What is done, of how many if that is known, and what is counted."""
        if self.view.step is not None:
            return self.view.step, self.view.steps, "rounds"
        if self.data_rows is not None:
            return *self.data_rows, "rows"
        if self.parts is not None:
            return *self.parts, "slices"
        return (self.tasks, None, "tasks") if self.tasks else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds from the last event until the end of the job."""
        if self.parts is None or self._began is None or self.view.step is not None or self.view.state != "running":
            return self.view.seconds_left
        (began, before), (done, planned) = self._began, self.parts
        return (planned - done) * (self.view.at - began) / (done - before) if done > before else None
