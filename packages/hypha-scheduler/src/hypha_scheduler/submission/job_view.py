"""What a job's events say about it: its state, workers, rounds, cost and end, and a line for each event that counts.

Pure: the events and the times in them are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hypha_proto.ids import describe_peer
from hypha_scheduler.submission.event_follower import describe_event

_HOUR: Final = 3600.0
_STEPS: Final = 8
"""Rounds from whose times the end is estimated."""
_ENDS: Final = frozenset({"finished", "failed", "interrupted"})
"""Events at the end of a job."""
_ENDED: Final = _ENDS | {"cancelled"}
"""States of a job that has ended."""
_LOSSES: Final = frozenset({"worker_lost", "worker_left", "worker_replaced", "worker_excluded"})
DETAILS: Final = frozenset({"metric", "task_started", "task_progress"})
"""Events that are too many to be shown."""


@dataclass(slots=True)
class ShownWorker:
    """A worker of a job."""

    peer: str
    role: str
    price: float
    """Tokens per lease-hour."""
    since: float
    """Seconds since the Unix epoch."""
    name: str | None = None
    """Name in its certificate, if it is known."""

    def __str__(self) -> str:
        return f"{describe_peer(self.peer, self.name)} ({self.role}, {self.price:g}/h)"


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
    workers: dict[str, ShownWorker] = field(default_factory=dict)
    """By peer id."""
    at: float = 0.0
    """Time of the last event."""
    _spent: float = 0.0
    """Tokens for workers that have left."""
    _ends_of_steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS))

    def cost(self, now: float) -> float:
        """Return the tokens that the job has cost so far, from the prices and times of its leases."""
        until = self.at if self.state in _ENDED else max(now, self.at)
        return self._spent + sum(_cost(worker, until) for worker in self.workers.values())

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds from the end of the last round until the last planned one has ended."""
        if self.steps is None or len(self._ends_of_steps) < 2 or self.state in _ENDED:
            return None
        (first, began), (last, ended) = self._ends_of_steps[0], self._ends_of_steps[-1]
        return (self.steps - last) * (ended - began) / (last - first) if last > first else None

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
        line = describe_event(event)
        self._count(kind, event)
        return line

    def _begin(self, kind: str, event: Mapping[str, Any]) -> str | None:
        self.steps = event.get("rounds") if isinstance(event.get("rounds"), int) else self.steps
        self.state = "waiting" if kind == "queued" else "running"
        self._release_all()
        self._ends_of_steps.clear()
        return "continued by the scheduler" if kind == "resumed" else None

    def _place(self, event: Mapping[str, Any]) -> str:
        for worker in event.get("workers") or ():
            self._add_worker({"time": self.at, **worker})
        self.state = "running"
        seconds = _number(event.get("seconds")) or 0.0
        return f"placed after {seconds:.1f} s: {', '.join(map(str, self.workers.values()))}"

    def _add_worker(self, event: Mapping[str, Any]) -> None:
        peer, name = str(event.get("peer")), event.get("name")
        price = _number(event.get("price")) or 0.0
        self._release(peer)
        self.workers[peer] = ShownWorker(
            peer, str(event.get("role")), price, self.at, name if isinstance(name, str) else None
        )

    def _count(self, kind: str, event: Mapping[str, Any]) -> None:
        self.late += kind == "worker_late"
        if kind in _LOSSES and str(event.get("worker")) in self.workers:
            self.lost += kind == "worker_lost"
            self._release(str(event["worker"]))

    def _end_step(self, event: Mapping[str, Any]) -> str:
        number = event.get("round")
        if isinstance(number, int):
            self.step = number
            self._ends_of_steps.append((number, self.at))
        self.loss, self.samples_per_second = _number(event.get("loss")), _number(event.get("samples_per_second"))
        batches = sum(_values(event.get("counts")))
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
        if (worker := self.workers.pop(peer, None)) is not None:
            self._spent += _cost(worker, self.at)

    def _release_all(self) -> None:
        for peer in list(self.workers):
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


def _cost(worker: ShownWorker, until: float) -> float:
    return worker.price * max(0.0, until - worker.since) / _HOUR


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _values(value: object) -> list[float]:
    found = value.values() if isinstance(value, Mapping) else ()
    return [number for entry in found if (number := _number(entry)) is not None]
