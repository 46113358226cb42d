"""Outer updates that have arrived and that the scheduler has not committed yet, of one training job.

Asks the scheduler through `round_commits`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader
from hypha_worker.bridge.round_commits import RoundClient
from hypha_worker.task_files import safe_name

_log = logging.getLogger(__name__)

_DISCARDED: Final = instrumentation.Counter(
    "hypha.worker.outer_updates.discarded", "{file}", "Outer updates that the scheduler does not commit."
)


@dataclass(frozen=True, slots=True)
class PendingFile:
    """A queued file."""

    sequence: int
    """Number of the file among those of its job, from 0 on."""
    peer: PeerId
    header: PushHeader
    path: Path
    size: int
    weights: str | None = None
    """Digest of the global weights after the round that the scheduler has committed with this file."""

    @property
    def name(self) -> str:
        """The name that its sender gave it, made safe."""
        return safe_name(self.header.name)


class UncommittedUpdates:
    """Keeps outer updates until the scheduler has committed them, or never will."""

    def __init__(self, commits: RoundClient, term: int, *, joins: bool = False) -> None:
        """Prepare; `run` asks the scheduler.

        Args:
            commits: asks about the job's rounds.
            term: term of the parameter server when the job began; older ones are refused.
            joins: whether the executor has yet to join the rounds; until then it takes no updates.
        """
        self._commits = commits
        self.term = term
        """Updates of parameter servers before it are refused."""
        self.begins: int | None = None if joins else 0
        """Round from which on the executor takes updates; None while it has not joined."""
        self._known: set[tuple[int, str]] = set()
        """Round and digest of the updates that wait or were committed."""
        self._waiting: set[tuple[int, str]] = set()
        self._add, self._added = anyio.create_memory_object_stream[tuple[PendingFile, int, str]](math.inf)

    @property
    def count(self) -> int:
        """Number of files that wait."""
        return len(self._waiting)

    def reason_against(self, header: PushHeader) -> str | None:
        """Return why an update that is about to come is refused, or None if it is accepted."""
        if header.term is not None and header.term < self.term:
            return f"term: {header.term} is over, the parameter server of term {self.term} has taken its place"
        if not self.is_wanted(header.round):
            return f"the executor does not take part in round {header.round}"
        return None

    def is_wanted(self, number: int) -> bool:
        """Return whether the executor takes the update of a round."""
        return self.begins is not None and number >= self.begins

    def is_known(self, number: int, digest: str) -> bool:
        """Return whether an update of a round waits, or was committed."""
        return (number, digest) in self._known

    def add(self, file: PendingFile, digest: str) -> bool:
        """Keep a file that has arrived until it is committed; return False if it is known already, or the job ends."""
        if file.header.term is not None:
            self.term = max(self.term, file.header.term)
        key = (file.header.round, digest)
        if key in self._known or not self.is_wanted(key[0]):
            return False
        try:
            self._add.send_nowait((file, *key))
        except anyio.BrokenResourceError:  # `run` has ended
            return False
        self._known.add(key)
        self._waiting.add(key)
        return True

    def close(self) -> None:
        """Take no more files."""
        self._add.close()

    async def run(self, deliver: Callable[[PendingFile], None]) -> None:
        """Ask the scheduler about each file until the job ends; pass those that it has committed to `deliver`."""
        async with self._added, anyio.create_task_group() as tasks:
            async for file, number, digest in self._added:
                tasks.start_soon(self._wait_for_commit, file, number, digest, deliver)

    async def _wait_for_commit(
        self, file: PendingFile, number: int, digest: str, deliver: Callable[[PendingFile], None]
    ) -> None:
        status = await self._commits.wait(number, digest)
        self._waiting.discard((number, digest))
        if not self.is_wanted(number):  # the executor has begun anew meanwhile
            self._known.discard((number, digest))
            file.path.unlink(missing_ok=True)
            return
        if status.committed:
            deliver(replace(file, weights=status.weights))
            return
        self._known.discard((number, digest))  # a later parameter server may compute the same again
        _log.warning("outer update of round %d from %s is not committed: %s", number, file.peer, status.reason)
        _DISCARDED.add(1)
        file.path.unlink(missing_ok=True)
