"""Tells the parameter server which workers send it updates and get outer updates, whenever they change. Pure.

A worker begins with a round only once the parameter server knows it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hypha_proto.commands import CommandAnswer, SetWorkers
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import SendCommand, TaskRef

_log = logging.getLogger(__name__)

_TAG: Final = "job workers"


@dataclass(slots=True)
class WorkerList:
    """The list of one parameter server; the next one is sent when the one before is answered."""

    server: TaskRef | None
    """Task of the parameter server; None if it was lost while the scheduler was away."""
    term: int
    """Its term."""
    known: frozenset[PeerId]
    """Workers that the parameter server knows."""
    is_open: bool = False
    """Whether the parameter server's task has started."""
    _wanted: frozenset[PeerId] = frozenset()
    _in_flight: frozenset[PeerId] | None = None

    def __post_init__(self) -> None:
        self._wanted = self.known

    @property
    def tag(self) -> str:
        """Tag of its messages."""
        return f"{_TAG} of term {self.term}"

    def open(self) -> tuple[SendCommand, ...]:
        """Send the list from now on: the parameter server's task has started."""
        self.is_open = True
        return self.send()

    def set(self, workers: Iterable[PeerId]) -> tuple[SendCommand, ...]:
        """Tell the parameter server of the workers, now or after its response to an earlier list."""
        self._wanted = frozenset(workers)
        return self.send()

    def send(self) -> tuple[SendCommand, ...]:
        """Send the list again if the parameter server does not know it and no message is under way."""
        if self.server is None or not self.is_open or self._in_flight is not None or self._wanted == self.known:
            return ()
        self._in_flight = self._wanted
        command = SetWorkers(workers=tuple(sorted(self._wanted)))
        about = {"hypha.workers": len(self._wanted)}
        return (SendCommand(self.server, command, self.tag, "name workers", about),)

    def on_result(self, outcome: object) -> tuple[SendCommand, ...]:
        """Handle the response of the parameter server, or why there is none; return the next message."""
        sent, self._in_flight = self._in_flight, None
        if sent is None:
            return ()
        if isinstance(outcome, CommandAnswer) and outcome.accepted:
            self.known = sent
            return self.send()
        _log.warning("the parameter server of term %d was not told of the job's workers: %s", self.term, outcome)
        return ()
