"""Logs of jobs: a scheduler reads what the executors of its job have printed at a worker.

Uses the extension ``/hypha-logs/0.1.0``. A position counts the bytes that a run has printed, including those that its
worker has removed since. A text consists of whole lines, because a worker hides secrets line by line.
"""

from __future__ import annotations

import uuid
from typing import Final

from hypha_proto.protocols import LOGS, RpcMethod
from hypha_proto.wire_schema import U32, U64, Message

MAX_LOGS: Final = 256
"""Maximum number of runs that a worker lists: those that printed last."""
MAX_TEXT: Final = 256 << 10
"""Maximum number of printed bytes that a worker reads for one answer."""
_MAX_RESPONSE: Final = 2 << 20
"""Limit of an answer in bytes: hiding secrets, and replacing bytes that are not UTF-8, may lengthen a text."""


class ListLogs(Message, frozen=True):
    """Request of a scheduler for the logs of a job of its own."""

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
    """Position of the first wanted byte. If it is within a line, the text begins with the next line."""
    limit: U32
    """Maximum number of bytes to read; larger numbers mean `MAX_TEXT`."""


class LogPart(Message, frozen=True):
    """Response to `ReadLog`: whole lines, without secrets."""

    known: bool
    """Whether the scheduler that asks has such a log here."""
    text: str
    start: U64
    """Position at which the text begins: later than requested if bytes were removed or skipped."""
    next: U64
    """Position to read from next; the requested one if there is no further line yet."""


LIST_LOGS: Final = RpcMethod(LOGS, ListLogs, LogsListed, "ListLogs", max_response=_MAX_RESPONSE)
READ_LOG: Final = RpcMethod(LOGS, ReadLog, LogPart, "ReadLog", max_response=_MAX_RESPONSE)
