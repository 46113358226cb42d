"""Pushes one outer update to the scheduler and to the workers of a job, all at the same time.

The next round goes on while peers that cannot be reached still have attempts left.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from hypha_net import instrumentation, retries
from hypha_net.errors import NetError, TransferRefusedError
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PushHeader

_log = logging.getLogger(__name__)

PATIENCE: Final = 2.0
"""Least number of seconds for which members are waited for when the scheduler has the outer update."""
LAST_PATIENCE: Final = 10.0
"""The same for the outer update of the last round, after which nothing is pushed any more."""


@dataclass(slots=True)
class OuterPush:
    """The push of the outer update of one round."""

    path: Path
    """The outer update, which `run` removes in the end."""
    header: PushHeader
    """Describes it."""
    members: Collection[PeerId]
    """Receivers that are waited for: the scheduler, and those whose updates count."""
    others: Collection[PeerId]
    """All other receivers."""
    repeats: bool
    """Whether a receiver that cannot be reached is tried again until `stop`."""
    reached: set[PeerId] = field(default_factory=set)
    """Peers that have the outer update."""
    _scopes: dict[PeerId, anyio.CancelScope] = field(default_factory=dict)
    """Of the peers that still have attempts left."""
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _began: float = field(default_factory=anyio.current_time)

    def __post_init__(self) -> None:
        self._scopes = {peer: anyio.CancelScope() for peer in (*self.members, *self.others)}

    async def run(self, push_to: Callable[[PeerId, Path, PushHeader], Awaitable[int]]) -> None:
        """Push the outer update to all receivers; each failure is logged once."""
        about = {"hypha.round": self.header.round, "hypha.peers": len(self._scopes)}
        try:
            with instrumentation.span("send outer update", about):
                async with anyio.create_task_group() as tasks:
                    for peer in list(self._scopes):
                        tasks.start_soon(self._push_to, peer, push_to)
        finally:
            self.path.unlink(missing_ok=True)

    async def _push_to(self, peer: PeerId, push_to: Callable[[PeerId, Path, PushHeader], Awaitable[int]]) -> None:
        try:
            with self._scopes[peer]:
                failures = 0
                while not await self._attempt(peer, push_to, failures):
                    await retries.UPDATE.wait(failures)
                    failures += 1
        finally:
            del self._scopes[peer]
            self._changed.set()

    async def _attempt(
        self, peer: PeerId, push_to: Callable[[PeerId, Path, PushHeader], Awaitable[int]], failures: int
    ) -> bool:
        """Push to one receiver; return whether no further attempt follows."""
        try:
            await push_to(peer, self.path, self.header)
        except NetError as error:
            level = logging.DEBUG if failures else logging.WARNING if peer in self.members else logging.INFO
            _log.log(level, "outer update of round %d did not reach %s: %s", self.header.round, peer, error)
            return not self.repeats or isinstance(error, TransferRefusedError)
        self.reached.add(peer)
        return True

    def stop(self, peers: Iterable[PeerId] | None = None) -> None:
        """Push to some peers no longer; by default, to none."""
        for peer in list(self._scopes) if peers is None else peers:
            if peer in self._scopes:
                _log.info("outer update of round %d is pushed to %s no longer", self.header.round, peer)
                self._scopes[peer].cancel()

    async def wait(self, scheduler: PeerId | None, patience: float = 0.0) -> None:
        """Wait until no member has attempts left.

        Args:
            scheduler: if it is given, and has the update or has refused it, the others have as much time again; then
                the push goes on alone.
            patience: the least number of seconds that they have then.
        """
        with anyio.CancelScope() as scope:
            while not self._scopes.keys().isdisjoint(self.members):
                now = anyio.current_time()
                if scheduler is not None and scheduler not in self._scopes:
                    scope.deadline = min(scope.deadline, now + max(patience, now - self._began))
                self._changed = anyio.Event()
                await self._changed.wait()
