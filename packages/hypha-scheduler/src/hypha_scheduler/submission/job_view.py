"""What a job's events say about it: its state, progress, workers, cost and end, and a line for each event that counts.

Pure: the events and the times in them are passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hypha_proto import job_events
from hypha_proto.ids import describe_peer

_HOUR: Final = 3600.0
_STEPS: Final = 8
"""Rounds from whose times the end is estimated."""
_ENDS: Final = frozenset({"finished", "failed", "interrupted"})
"""Events at the end of a job."""
_ENDED: Final = _ENDS | {"cancelled"}
"""States of a job that has ended."""
_GONE: Final = {
    "worker_lost": "lost",
    "worker_left": "left",
    "worker_replaced": "replaced",
    "worker_excluded": "excluded",
}
_LATE: Final = frozenset({"worker_late", "worker_suspected"})
_DOING: Final = {
    "lease_draining": "drains",
    "worker_joined": "works",
    "worker_suspected": "suspected",
    "worker_late": "late",
    "worker_restarted": "restarted",
    **_GONE,
}
_MEASURED: Final = frozenset({"samples", "batches", "samples_per_second"})
_LOSSES: Final = 40
"""Rounds whose losses are remembered."""
DETAILS: Final = frozenset({"metric", "task_started", "task_progress"})
"""Events that are too many to be shown."""
_SHOWN: Final = {**job_events.MEMBER_CHANGES, "shortage": "waiting for workers", "warning": "warning"}
"""Events that are shown, and how."""


def describe_event(event: Mapping[str, Any]) -> str | None:
    """Return the line for an event that changes who works on a job, or None for another one."""
    return job_events.describe_event(event, _SHOWN)


@dataclass(slots=True)
class ShownWorker:
    """A worker of a job."""

    peer: str
    role: str
    price: float
    """Tokens per lease-hour."""
    since: float | None
    """Seconds since the Unix epoch; None if the job does not pay for it any more."""
    name: str | None = None
    """Name in its certificate, if it is known."""
    doing: str = "placed"
    is_gone: bool = False
    """Whether it works on the job no more."""
    is_late: bool = False
    """Whether it is late, or suspected to be."""
    measured: dict[str, float] = field(default_factory=dict)
    """Its metrics over its last round."""

    def __str__(self) -> str:
        return f"{self.shown_name} ({self.role}, {self.price:g}/h)"

    @property
    def shown_name(self) -> str:
        """Its name and the end of its id."""
        return describe_peer(self.peer, self.name)

    @property
    def samples_per_second(self) -> float | None:
        """Samples that it trains a second."""
        return self.measured.get("samples_per_second")

    @property
    def batch_size(self) -> float | None:
        """Mean over the batches of its last round."""
        batches, samples = self.measured.get("batches"), self.measured.get("samples")
        return samples / batches if batches and samples is not None else None

    def cost(self, until: float) -> float:
        """Return the tokens that it has cost since the job pays for it."""
        return 0.0 if self.since is None else self.price * max(0.0, until - self.since) / _HOUR


@dataclass(slots=True)
class JobView:
    """State of a job after the events that it was told."""

    state: str = "accepted"
    steps: int | None = None
    """Number of planned rounds, if it is known."""
    step: int | None = None
    """Last round that has ended."""
    loss: float | None = None
    samples_per_second: float | None = None
    batch_size: float | None = None
    """Mean over the batches of the last round."""
    longest_wait: float | None = None
    """Seconds for which the worker that waited longest did so in the last round."""
    lost: int = 0
    late: int = 0
    rows: dict[str, ShownWorker] = field(default_factory=dict)
    """Workers by peer id, also those that have left."""
    at: float = 0.0
    """Time of the last event."""
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
    _spent: float = 0.0
    """Tokens for workers that have left."""
    _ends_of_steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def cost(self, now: float) -> float:
        """Return the tokens that the job has cost so far, from the prices and times of its leases."""
        until = self.at if self.state in _ENDED else max(now, self.at)
        return self._spent + sum(worker.cost(until) for worker in self.rows.values())

    @property
    def workers(self) -> dict[str, ShownWorker]:
        """Those that the job pays for, by peer id."""
        return {peer: worker for peer, worker in self.rows.items() if worker.since is not None}

    @property
    def progress(self) -> tuple[int, int | None, str] | None:
        """What is done, of how many if that is known, and what is counted."""
        if self.step is not None:
            return self.step, self.steps, "rounds"
        if self.data_rows is not None:
            return *self.data_rows, "rows"
        if self.parts is not None:
            return *self.parts, "slices"
        return (self.tasks, None, "tasks") if self.tasks else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds from the last event of a running job, or its last round, until the last planned one."""
        if self.parts is not None and self._began is not None and self.step is None:
            planned, (began, first), (ended, last) = self.parts[1], self._began, (self.at, self.parts[0])
        elif self.steps is not None and len(self._ends_of_steps) > 1:
            planned, (began, first), (ended, last) = self.steps, self._ends_of_steps[0], self._ends_of_steps[-1]
        else:
            return None
        has_estimate = last > first and self.state not in _ENDED
        return (planned - last) * (ended - began) / (last - first) if has_estimate else None

    def add(self, event: Mapping[str, Any]) -> str | None:
        """Take the next event; return a line for it if it is to be shown."""
        kind = str(event.get("event"))
        self.at = _number(event.get("time")) or self.at
        if kind in ("queued", "accepted", "resumed"):
            return self._begin(kind, event)
        if kind == "placement":
            return self._place(event)
        if kind == "round":
            return self._end_step(event)
        if kind in _ENDS:
            return self._end(kind, event)
        if kind == "lease_added":
            self._add_worker(event)
        if kind in ("shortage", "lease_added") and self.state in ("waiting", "running"):
            self.state = "running" if self.workers else "waiting"
        self._take(kind, event)
        return describe_event(event)

    def _begin(self, kind: str, event: Mapping[str, Any]) -> str | None:
        self.steps = event.get("rounds") if isinstance(event.get("rounds"), int) else self.steps
        self.state, self.is_paused = "waiting" if kind == "queued" else "running", False
        self._release_all()
        self.rows.clear()
        self._began = None
        self._ends_of_steps.clear()
        return "continued by the scheduler" if kind == "resumed" else None

    def _place(self, event: Mapping[str, Any]) -> str:
        for worker in event.get("workers") or ():
            self._add_worker(worker)
        self.state = "running"
        seconds = _number(event.get("seconds")) or 0.0
        return f"placed after {seconds:.1f} s: {', '.join(map(str, self.workers.values()))}"

    def _add_worker(self, event: Mapping[str, Any]) -> None:
        peer, name = str(event.get("peer")), event.get("name")
        role, price = str(event.get("role")), _number(event.get("price")) or 0.0
        self._release(peer)
        worker = ShownWorker(peer, role, price, self.at, name if isinstance(name, str) else None)
        if peer in self.rows and not (known := self.rows[peer]).is_gone:
            worker.doing, worker.is_late, worker.measured = known.doing, known.is_late, known.measured
        self.rows[peer] = worker

    def _take(self, kind: str, event: Mapping[str, Any]) -> None:
        peer = str(event.get("worker") or event.get("peer"))
        if kind == "metric":
            self._measure(peer, event)
        elif kind in ("slices", "part"):
            self._count_parts(kind, event)
        elif kind == "task_ended":
            self.tasks += event.get("outcome") == "finished"
            self._do(peer, "idle")
        elif kind == "task_started":
            self._do(peer, str(event.get("task")))
        elif kind in _DOING:
            self.late += kind == "worker_late"
            self.lost += kind == "worker_lost" and peer in self.workers
            self._do(peer, _DOING[kind], is_gone=kind in _GONE, is_late=kind in _LATE)
        elif kind in ("paused", "continued"):
            self.is_paused = kind == "paused"

    def _do(self, peer: str, doing: str, *, is_gone: bool = False, is_late: bool = False) -> None:
        if (worker := self.rows.get(peer)) is not None:
            worker.doing, worker.is_gone, worker.is_late = doing, is_gone, is_late
            if is_gone:
                self._release(peer)

    def _measure(self, peer: str, event: Mapping[str, Any]) -> None:
        name, value = event.get("name"), _number(event.get("value"))
        if peer in self.rows and name in _MEASURED and value is not None and math.isfinite(value):
            self.rows[peer].measured[str(name)] = value

    def _count_parts(self, kind: str, event: Mapping[str, Any]) -> None:
        done, planned, rows = (event.get(key) for key in ("committed", "slices", "rows"))
        if not (isinstance(done, int) and isinstance(planned, int)):
            return
        self.parts = (done, planned)
        if kind == "slices":
            self._began = (self.at, done)
            # of a resumed job it is not known how many rows were done
            self.data_rows = (0, rows) if isinstance(rows, int) and done == 0 else None
        elif isinstance(rows, int) and self.data_rows is not None:
            self.data_rows = (self.data_rows[0] + rows, self.data_rows[1])
            self._do(str(event.get("worker")), "works")

    def _end_step(self, event: Mapping[str, Any]) -> str:
        number, counts = event.get("round"), event.get("counts")
        if isinstance(number, int):
            self.step = number
            self._ends_of_steps.append((self.at, number))
        self.loss, self.samples_per_second = _number(event.get("loss")), _number(event.get("samples_per_second"))
        if self.loss is not None and math.isfinite(self.loss):
            self.losses.append(self.loss)
        for peer in counts if isinstance(counts, Mapping) else ():
            self._do(peer, "works")
        batches = sum(_values(counts))
        self.batch_size = (_number(event.get("samples")) or 0.0) / batches if batches else None
        self.longest_wait = max(_values(event.get("waits")), default=None)
        return self.describe_progress(self.at)

    def describe_progress(self, now: float) -> str:
        """Return the last round, the cost and the estimated end as a line."""
        planned = "" if self.steps is None else f" of {self.steps}"
        numbers = (
            ("loss {:.4g}", self.loss),
            ("{:.4g} samples/s", self.samples_per_second),
            ("batch size {:.3g}", self.batch_size),
            ("longest wait {:.1f} s", self.longest_wait),
            ("cost {:.4g}", self.cost(now)),
        )
        found = [text.format(value) for text, value in numbers if value is not None]
        if self.seconds_left is not None:
            found.append(f"{readable_seconds(self.seconds_left)} left")
        return f"round {self.step}{planned}: {', '.join(found)}"

    def _end(self, kind: str, event: Mapping[str, Any]) -> str:
        self.state = "cancelled" if event.get("cancelled") is True else kind
        why = str(event.get("error") or event.get("reason") or "").partition("\n")[0]
        self._release_all()
        return f"{self.state}{f': {why}' if why else ''}, cost {self._spent:.4g}"

    def _release(self, peer: str) -> None:
        if (worker := self.rows.get(peer)) is not None:
            self._spent += worker.cost(self.at)
            worker.since = None

    def _release_all(self) -> None:
        for peer in self.rows:
            self._release(peer)

    def summary(self, now: float) -> dict[str, Any]:
        """Return the state as plain values; see the schema of ``status --format json``."""
        return {
            "state": self.state,
            "round": self.step,
            "rounds": self.steps,
            "loss": self.loss,
            "samples_per_second": self.samples_per_second,
            "batch_size": self.batch_size,
            "longest_wait": self.longest_wait,
            "late": self.late,
            "lost": self.lost,
            "cost": round(self.cost(now), 6),
            "seconds_left": self.seconds_left,
            "workers": [
                {"peer": worker.peer, "name": worker.name, "role": worker.role, "price": worker.price}
                for worker in self.workers.values()
            ],
        }


def readable_seconds(seconds: float) -> str:
    """Return a duration for people, such as ``2 h 5 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _values(value: object) -> list[float]:
    found = value.values() if isinstance(value, Mapping) else ()
    return [number for entry in found if (number := _number(entry)) is not None]
