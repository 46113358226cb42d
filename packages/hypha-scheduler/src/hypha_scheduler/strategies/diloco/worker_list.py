"""Tells the parameter server which workers send it updates and get outer updates, whenever they change. Pure.

Called by `membership`. A worker begins with a round only once the parameter server knows it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hypha_net.errors import UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JOB_WORKERS, JobWorkers, JobWorkersKnown
from hypha_scheduler.strategies.base import SendMessage

_log = logging.getLogger(__name__)

_TAG: Final = "job workers"
_RUN: Final = 1 << 20
"""Versions in one run of the scheduler; the next one begins above them."""


@dataclass(slots=True)
class WorkerList:
    """The list of one parameter server; its messages never overtake each other."""

    job_id: uuid.UUID
    server: PeerId
    term: int
    known: frozenset[PeerId]
    """Workers that the parameter server knows."""
    records: int = 0
    """Number of journal records at the start of this run of the scheduler: versions grow with it."""
    is_open: bool = False
    """Whether the parameter server's task has started."""
    is_fixed: bool = False
    """Whether the parameter server takes no other workers than those with which it began."""
    _wanted: frozenset[PeerId] = frozenset()
    _in_flight: frozenset[PeerId] | None = None
    _sent: int = 0

    def __post_init__(self) -> None:
        self._wanted = self.known

    @property
    def tag(self) -> str:
        """Tag of its messages."""
        return f"{_TAG} of term {self.term}"

    def open(self) -> tuple[SendMessage, ...]:
        """Send the list from now on: the parameter server's task has started."""
        self.is_open = True
        return self.send()

    def set(self, workers: Iterable[PeerId]) -> tuple[SendMessage, ...]:
        """Tell the parameter server of the workers, now or after its response to an earlier list."""
        self._wanted = frozenset(workers)
        return self.send()

    def send(self) -> tuple[SendMessage, ...]:
        """Send the list again if the parameter server does not know it and no message is under way."""
        if not self.is_open or self._in_flight is not None or self.is_fixed or self._wanted == self.known:
            return ()
        self._in_flight = self._wanted
        self._sent += 1
        message = JobWorkers(
            job_id=self.job_id,
            term=self.term,
            version=self.records * _RUN + self._sent,
            workers=tuple(sorted(self._wanted)),
        )
        about = {"hypha.workers": len(self._wanted)}
        return (SendMessage(self.server, JOB_WORKERS, message, self.tag, span="name workers", about=about),)

    def on_result(self, outcome: object) -> tuple[SendMessage, ...]:
        """Handle the response of the parameter server, or why there is none; return the next message."""
        sent, self._in_flight = self._in_flight, None
        if sent is None:
            return ()
        if isinstance(outcome, JobWorkersKnown) and outcome.accepted:
            self.known = sent
            return self.send()
        if isinstance(outcome, UnsupportedProtocolError):
            _log.info("the parameter server %s takes no further workers", self.server)
            self.is_fixed = True
        else:
            _log.warning("the parameter server %s was not told of the job's workers: %s", self.server, outcome)
        return ()
