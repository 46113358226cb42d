"""Logs of jobs: a scheduler reads what the executors of its job have printed at a worker.

Uses the extension ``/hypha-logs/0.1.0``. A position counts the bytes that a run has printed, those included that its
worker has removed since. A worker hides secrets in whole lines, so that it begins and ends a text between lines.
"""

from __future__ import annotations

import uuid
from typing import Final

from hypha_proto.protocols import LOGS, RpcMethod
from hypha_proto.wire_schema import U32, U64, Message

MAX_LOGS: Final = 256
"""Maximum number of runs that a worker lists; the ones that have printed last."""
MAX_TEXT: Final = 256 << 10
"""Maximum number of printed bytes that a worker reads for one answer."""
_MAX_RESPONSE: Final = 2 << 20
"""Hiding secrets, and replacing what is no text, may lengthen a text."""


class ListLogs(Message, frozen=True):
    """Request for the logs of a job that run, or ran, for the scheduler which asks."""

    job_id: uuid.UUID


class LogEntry(Message, frozen=True):
    """The log of one run of an executor."""

    run: str
    """Lease or task; ``@`` and a number follow from the second run on."""
    start: U64
    """Position of the first byte that is still there."""
    end: U64
    """Position after the last byte."""
    ended: bool
    """Whether the run is over, so that nothing will follow."""


class LogsListed(Message, frozen=True):
    """Response to `ListLogs`; empty also for a job of another scheduler."""

    logs: tuple[LogEntry, ...]
    """At most `MAX_LOGS`, the one that was written last at the end."""

    def __post_init__(self) -> None:
        if len(self.logs) > MAX_LOGS:
            raise ValueError(f"logs: {len(self.logs)} entries; expected at most {MAX_LOGS}")


class ReadLog(Message, frozen=True):
    """Request for a part of a log."""

    job_id: uuid.UUID
    run: str
    position: U64
    """First byte that is wanted. Within a line the text begins with the next line."""
    limit: U32
    """Bytes that are read at most; `MAX_TEXT` if it is larger."""


class LogPart(Message, frozen=True):
    """Response to `ReadLog`: whole lines, without secrets."""

    known: bool
    """Whether the scheduler that asks has such a log here."""
    text: str
    start: U64
    """Position at which the text begins: a later one than was asked for where bytes were removed or skipped."""
    next: U64
    """Position to read from next; not beyond the one that was asked for if there is no further line yet."""


LIST_LOGS: Final = RpcMethod[ListLogs, LogsListed](LOGS, ListLogs, LogsListed, "ListLogs", max_response=_MAX_RESPONSE)
READ_LOG: Final = RpcMethod[ReadLog, LogPart](LOGS, ReadLog, LogPart, "ReadLog", max_response=_MAX_RESPONSE)
