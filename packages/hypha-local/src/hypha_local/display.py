"""Progress display: shows the scheduler's events on stderr, with a live bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hypha_proto.ids import describe_peer
from hypha_proto.job_events import describe_event
from hypha_proto.record_file import EVENTS, RecordReader

PARTS_SHOWN: Final = 12
"""Most lines for the parts of an inference job, where there is no progress bar."""
_ALARMS: Final = ("worker_lost", "worker_suspected", "worker_late", "worker_excluded", "paused")
"""Changes of a job's members that are shown in red."""


@dataclass(slots=True)
class EventLog:
    """Reader of the scheduler's ``metrics.jsonl``, which appears in a subdirectory of `runs`."""

    runs: Path
    _reader: RecordReader | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return the events written since the last call."""
        if self._reader is None and (found := sorted(self.runs.glob(f"*/{EVENTS}"))):
            self._reader = RecordReader(found[0])
        return [] if self._reader is None else self._reader.read()


@dataclass(slots=True)
class Display:
    """Progress output for people."""

    console: Console
    rounds: int
    """Total number of rounds; 0 if nothing is trained."""
    started: float = field(default_factory=time.monotonic)
    names: Mapping[str, str] = field(default_factory=dict)
    """Names by which peers are shown, by peer id."""
    _progress: Progress | None = None
    _task: TaskID = field(default=TaskID(0))
    _rows: int = 0

    def step(self, text: str, *, alarm: str = "") -> None:
        """Print a step with the elapsed time, preceded by `alarm` in red."""
        head = f"[dim]{time.monotonic() - self.started:6.1f} s[/]  " + (f"[bold red]{alarm}[/] " if alarm else "")
        # escaped, since errors and package names contain brackets, which are not markup
        self.console.print(head + escape(self.named(text)), highlight=False, soft_wrap=True)

    def named(self, text: str) -> str:
        """Return `text` with the names of peers and the ends of their ids in place of the ids."""
        for peer, name in self.names.items():
            text = text.replace(peer, describe_peer(peer, name))
        return text

    def event(self, event: dict[str, Any]) -> None:
        """Show one of the scheduler's events."""
        if event.get("event") == "placement":
            self.step(f"placement: {len(event['workers'])} leases held after {event['seconds']:.2f} s")
        elif event.get("event") == "round":
            self._round(event)
        elif (change := describe_event(event)) is not None:
            label, _, text = change.partition(": ")
            is_alarm = event["event"] in _ALARMS
            self.step(text if is_alarm else change, alarm=f"{label}:" if is_alarm else "")
        elif event.get("event") == "shortage":
            self.step(f"waiting for workers: {event['role']}: {event['text']}")
        elif event.get("event") == "slice_set_aside":
            reasons = "; ".join(f"data node {peer}: {reason}" for peer, reason in event["providers"].items())
            self.step(f"the job continues without slice {event['slice']}: {reasons}", alarm="slice set aside:")
        elif event.get("event") == "part":
            self._part(event)
        elif event.get("event") == "attempt_failed":
            reason = str(event["reason"]).partition("\n")[0]  # the executor's last lines follow
            text = f"{event['worker']}: {reason}; slices {event['slices']} are assigned again"
            self.step(text, alarm="executor failed:")
        elif event.get("event") in ("part_dropped", "part_refused"):
            self.step(f"slice {event['slice']} of {event['worker']}: {event['reason']}", alarm="part not used:")
        elif event.get("event") == "failed":
            self.step(str(event.get("error", "")), alarm="job failed:")

    def _round(self, event: dict[str, Any]) -> None:
        loss = "-" if event.get("loss") is None else f"{event['loss']:.4f}"
        text = f"loss {loss}  {event.get('samples_per_second') or 0:.0f} samples/s"
        if "update_bytes" in event:
            text += f"  {event['update_bytes'] / 1e6:.2f} MB exchanged"
        if self._progress is None:
            self.step(f"round {event['round']}/{self.rounds}: {text}")
        else:
            self._progress.update(self._task, completed=event["round"], status=text)

    def _part(self, event: dict[str, Any]) -> None:
        done, total = event["committed"], event["slices"]
        self._rows += event["rows"]
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, status=f"{self._rows} rows")
        elif done * PARTS_SHOWN // total > (done - 1) * PARTS_SHOWN // total:
            self.step(f"part {done}/{total}: {self._rows} rows")

    @contextmanager
    def counting(self, unit: str) -> Iterator[None]:
        """Show a progress bar for `unit` while the context is open, if there is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn(f"         {unit}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )  # fmt: skip
        with Progress(*columns, console=self.console) as progress:
            self._progress = progress
            self._task = progress.add_task(
                unit, total=self.rounds or None, status=f"waiting for the first of the {unit}"
            )
            try:
                yield
            finally:
                self._progress = None
