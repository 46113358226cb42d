"""The name of an attempt at a task, by which messages say what they are about."""

from __future__ import annotations

import re
import uuid
from typing import Final

from hypha_proto.ids import NAME
from hypha_proto.texts import quote
from hypha_proto.wire_schema import U32, Message

_TASK: Final = re.compile(NAME + r"(\[[0-9]{1,10}\])?")


class AttemptId(Message, frozen=True):
    """One attempt at a task of a job. Only together with the job's scheduler it is unique."""

    job_id: uuid.UUID
    task: str
    """Name of the task, with the number of the instance in brackets where there are several."""
    number: U32
    """Grows with each attempt at the task."""

    def __post_init__(self) -> None:
        if not _TASK.fullmatch(self.task):
            raise ValueError(f"task {quote(self.task)} is no name: use letters, digits and _.-, then [number]")
