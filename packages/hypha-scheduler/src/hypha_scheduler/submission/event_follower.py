"""Follows the events of a job: all that its event file has, then what is added.

The client runs on the scheduler's machine, since it speaks to a Unix socket, and reads the job's ``metrics.jsonl``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hypha_proto import job_events
from hypha_scheduler.jobs.record_file import RecordReader

INTERVAL: Final = 0.5
"""Seconds between two looks at the file."""
_SHOWN: Final = {**job_events.MEMBER_CHANGES, "shortage": "waiting for workers", "warning": "warning"}
"""Events that are shown, and how."""


def describe_event(event: Mapping[str, Any]) -> str | None:
    """Return the line for an event that changes who works on a job, or None for another one."""
    return job_events.describe_event(event, _SHOWN)


@contextmanager
def follow_events(path: Path, handle: Callable[[dict[str, Any]], None], position: int = 0) -> Iterator[None]:
    """Pass on the events of a job until the end of the context.

    Args:
        path: the job's ``metrics.jsonl``; it need not exist yet.
        handle: called in a thread with each event.
        position: size of what was in the file before, in bytes.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(RecordReader(path, position), handle, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(reader: RecordReader, handle: Callable[[dict[str, Any]], None], ended: threading.Event) -> None:
    is_last = False
    while not is_last:
        is_last = ended.wait(INTERVAL)  # what was written before the end is still handled
        while events := reader.read():
            for event in events:
                handle(event)
