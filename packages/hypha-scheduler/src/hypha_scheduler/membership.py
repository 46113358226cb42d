"""Tells the parameter server whose updates a round is made of, and tells it again when a member is lost."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net import instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import ROUND_MEMBERS, Member, RoundMembers
from hypha_scheduler.strategies.diloco.rounds import Rounds, Synchronise

_log = logging.getLogger(__name__)

UPDATES_TIMEOUT: Final = 300.0
"""Seconds that the parameter server waits for updates whose sending has begun."""
_ATTEMPTS: Final = 4
_PAUSE: Final = 0.5


@dataclass(slots=True)
class RoundAnnouncer:
    """The scheduler's side of ``/hypha-aggregate`` for one job."""

    endpoint: Endpoint
    job_id: uuid.UUID
    server: PeerId
    timeout: float | None = None
    """Seconds for a round's updates to arrive; none: `UPDATES_TIMEOUT`."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _latest: Synchronise | None = None
    _accepted_round: int = 0
    """The last round whose members the parameter server has accepted."""
    _trace: str | None = field(default_factory=instrumentation.current_traceparent)
    """The job's, whoever's report it is that makes a round complete."""

    async def announce(self, members: Synchronise, rounds: Rounds, fail: Callable[[str], None]) -> None:
        """Tell the parameter server the members of a round; an older message never overtakes a newer.

        `fail` is called with the reason when it cannot be told, or does not accept; but not for a change of members
        that it has accepted once.
        """
        self._latest = members
        async with self._lock:
            if self._latest is not members:
                return
            about = {"hypha.round": members.round, "hypha.members": len(members.members)}
            with instrumentation.span("name members", about, parent=self._trace):
                why = await self._ask(members)
        if why is None:
            self._accepted_round = members.round
        elif members.round <= self._accepted_round:  # it may have closed the round; if not, the round's deadline tells
            _log.warning("round %d: its members are not changed any more: %s", members.round, why)
        elif rounds.closed < members.round:
            fail(f"round {members.round}: the parameter server {self.server} could not be told the members: {why}")

    async def _ask(self, members: Synchronise) -> str | None:
        """Send it, a few times if need be. Returns why it did not work."""
        message = RoundMembers(
            job_id=self.job_id,
            round=members.round,
            members=tuple(Member(peer=peer, samples=samples) for peer, samples in members.members),
            deadline_ms=int((self.timeout or UPDATES_TIMEOUT) * 1000),
        )
        why = ""
        for attempt in range(_ATTEMPTS):
            try:
                answer = await rpc.call(self.endpoint, self.server, ROUND_MEMBERS, message)
            except UnsupportedProtocolError:
                _log.info("the parameter server %s aggregates whoever sends: it is not told members", self.server)
                return None
            except NetError as error:
                why = str(error)
                _log.warning("members of round %d, attempt %d: %s", members.round, attempt + 1, why)
                await anyio.sleep(_PAUSE * (attempt + 1))
            else:
                return None if answer.accepted else (answer.reason[:500] or "it does not accept them")
        return why
