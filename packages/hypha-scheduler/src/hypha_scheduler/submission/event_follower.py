"""Follows the events of a job: all that its event file has, then what is added. Called by `cli_jobs` and `client`.

The client runs on the scheduler's machine, since it speaks to a Unix socket, and reads the job's ``metrics.jsonl``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_proto import job_events
from hypha_proto.codec import parse_json, split_json_lines

INTERVAL: Final = 0.5
"""Seconds between two looks at the file."""
_MAX_READ: Final = 1 << 24
"""Bytes that are read at a time; no event is longer."""
_SHOWN: Final = {**job_events.MEMBER_CHANGES, "shortage": "waiting for workers", "warning": "warning"}
"""Events that are shown, and how."""


def describe_event(event: Mapping[str, Any]) -> str | None:
    """Return the line for an event that changes who works on a job, or None for another one."""
    return job_events.describe_event(event, _SHOWN)


@dataclass(slots=True)
class EventReader:
    """Reads the events of a job as they are written."""

    path: Path
    """The job's ``metrics.jsonl``; it need not exist yet."""
    position: int = 0
    """Bytes of the file that were read."""

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were added since the last call; a part of a line is left for the next one."""
        data = b""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(_MAX_READ)
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        return [event for line in split_json_lines(whole) if isinstance(event := parse_json(line), dict)]


@contextmanager
def follow_events(path: Path, handle: Callable[[dict[str, Any]], None], position: int = 0) -> Iterator[None]:
    """Pass on the events of a job until the end of the context.

    Args:
        path: the job's ``metrics.jsonl``; it need not exist yet.
        handle: called in a thread with each event.
        position: size of what was in the file before, in bytes.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(EventReader(path, position), handle, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(reader: EventReader, handle: Callable[[dict[str, Any]], None], ended: threading.Event) -> None:
    is_last = False
    while not is_last:
        is_last = ended.wait(INTERVAL)  # what was written before the end is still handled
        while events := reader.read():
            for event in events:
                handle(event)
