"""Reads what the executors of a job have printed, through the running scheduler.

The workers are those of the job's events. What a worker answers is not trusted: it is bounded, and characters that a
terminal would interpret are escaped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha_proto.ids import describe_peer
from hypha_proto.record_file import RecordReader
from hypha_scheduler.submission.client import JobCommandError, send_command

MAX_BYTES: Final = 1 << 20
"""Printed bytes of one worker that are read at a time; at first the last ones."""
_MAX_READS: Final = 64
"""Parts of the logs of one worker that are read at a time."""
_WORKERS_AT_ONCE: Final = 8
_SHORTEST_END: Final = 6
"""Last characters of a peer id by which a worker may be named."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that an executor has printed."""

    worker: str
    """Name in the worker's certificate and the end of its peer id."""
    peer: str
    run: str
    """Lease or task, as the worker calls it."""
    text: str
    """Without its end; every character can be printed."""


@dataclass(slots=True)
class JobLogs:
    """The logs of a job at its workers; each call of `read` continues where the last one ended."""

    socket: Path
    """The scheduler's."""
    job_id: str
    events: RecordReader
    """Of the job's ``metrics.jsonl``."""
    wanted: str | None = None
    """The only worker that is asked; see `is_meant`. All if None."""
    workers: dict[str, str] = field(default_factory=dict)
    """The job's workers as they are shown, by peer id, also those that have left."""
    failures: dict[str, str] = field(default_factory=dict)
    """By name, why a worker's logs could not be read the last time."""
    _positions: dict[str, dict[str, int]] = field(default_factory=dict)
    """By worker and run, from where is read next."""

    @property
    def chosen(self) -> Sequence[str]:
        """Peer ids of the workers that are asked."""
        return [
            peer for peer, shown in self.workers.items() if self.wanted is None or is_meant(self.wanted, peer, shown)
        ]

    def find_workers(self) -> None:
        """Learn of workers that the job's events name."""
        while events := self.events.read():
            for event in events:
                for worker in _workers_in(event):
                    peer, name = str(worker["peer"]), worker.get("name")
                    self.workers[peer] = describe_peer(peer, name)

    def read(self) -> Iterator[LogLine]:
        """Yield the lines that are new, worker by worker.

        Raises:
            NoSchedulerError: no scheduler runs.
            JobCommandError: it does not know the job any more.
        """
        self.find_workers()
        self.failures.clear()
        with ThreadPoolExecutor(_WORKERS_AT_ONCE) as threads:
            for lines in threads.map(self._read_worker, self.chosen):
                yield from lines

    def _read_worker(self, peer: str) -> list[LogLine]:
        lines: list[LogLine] = []
        try:
            runs = self._ask(peer)["logs"]
            self._positions[peer] = positions = self._begin(peer, runs)
            size = reads = 0
            for run in runs:
                name, end = run["run"], run["end"]
                while positions[name] < end and size < MAX_BYTES and reads < _MAX_READS:
                    part = self._ask(peer, run=name, position=positions[name])
                    if not part["known"] or part["next"] <= positions[name]:
                        break  # no further whole line yet
                    positions[name] = part["next"]
                    size, reads = size + len(part["text"]), reads + 1
                    shown = escape_controls(name)
                    lines += [LogLine(self.workers[peer], peer, shown, text) for text in split_lines(part["text"])]
        except JobCommandError as error:
            if error.code not in ("unreachable", "unsupported"):
                raise
            self.failures[self.workers[peer]] = str(error)
        return lines

    def _begin(self, peer: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return from where each run is read: a new one from its beginning, but at most the last bytes of all."""
        known, left = self._positions.get(peer, {}), MAX_BYTES
        found: dict[str, int] = {}
        for run in reversed(runs):
            begin = known.get(run["run"], max(run["start"], run["end"] - left))
            left -= min(left, max(0, run["end"] - begin))
            found[run["run"]] = begin
        return found

    def _ask(self, peer: str, **arguments: Any) -> dict[str, Any]:
        return send_command(self.socket, {"command": "logs", "id": self.job_id, "worker": peer, **arguments})


def _workers_in(event: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    if event.get("event") == "placement":
        return [worker for worker in event.get("workers") or () if "peer" in worker]
    return [event] if event.get("event") == "lease_added" and "peer" in event else []


def is_meant(wanted: str, peer: str, shown: str) -> bool:
    """Return whether `wanted` names a worker: by its name, as it is shown, by its id or the end of that."""
    end = wanted.removeprefix("…")
    return wanted in (shown.rpartition("…")[0], shown, peer) or (len(end) >= _SHORTEST_END and peer.endswith(end))


def last_lines(lines: Iterable[LogLine], count: int | None) -> Iterable[LogLine]:
    """Return the last `count` lines of each worker, all if it is None."""
    if count is None:
        return lines
    last: dict[str, deque[LogLine]] = {}
    for line in lines:
        last.setdefault(line.peer, deque(maxlen=count)).append(line)
    return (line for kept in last.values() for line in kept)


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, which end as executors end them, with what a terminal would interpret escaped."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [escape_controls(line) for line in (lines if lines[-1] else lines[:-1])]


def escape_controls(text: str) -> str:
    """Return a text in which what a terminal would interpret is escaped."""
    return "".join(char if char.isprintable() or char == "\t" else f"\\x{ord(char):02x}" for char in text)
