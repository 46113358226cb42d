"""Round announcements: sends the parameter server the members of each round, again whenever a member is lost.

Called by `training` for the effect `AnnounceRound` of `strategies.diloco.rounds`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net import backoff, instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import ROUND_MEMBERS, Member, RoundMembers
from hypha_scheduler.strategies.diloco.rounds import AnnounceRound, Rounds

_log = logging.getLogger(__name__)

UPDATES_TIMEOUT: Final = 300.0
"""Seconds that the parameter server waits for updates that workers have started to send."""
_RETRY_DELAYS: Final = (0.5, 1.0, 1.5)


@dataclass(slots=True)
class RoundAnnouncer:
    """Scheduler side of the protocol ``/hypha-aggregate`` for one job."""

    endpoint: Endpoint
    job_id: uuid.UUID
    server: PeerId
    timeout: float | None = None
    """Seconds for a round's updates to arrive; `UPDATES_TIMEOUT` if None."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _latest: AnnounceRound | None = None
    _accepted_round: int = 0
    """Last round whose members the parameter server has accepted."""
    _trace: str | None = field(default_factory=instrumentation.current_traceparent)
    """Trace context of the job; announcements are not part of the trace of the report that triggers them."""

    async def announce(self, members: AnnounceRound, rounds: Rounds, fail: Callable[[str], None]) -> None:
        """Announce the members of a round to the parameter server; messages never overtake each other.

        Args:
            members: the round and its members.
            rounds: state of the job's rounds.
            fail: called with the reason if the parameter server cannot be reached or rejects the members, unless it
                has accepted members of this round before.
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
        elif members.round <= self._accepted_round:  # the round may be closed already; if not, its deadline applies
            _log.warning("round %d: its members can no longer be changed: %s", members.round, why)
        elif rounds.closed < members.round:
            fail(f"round {members.round}: members could not be sent to parameter server {self.server}: {why}")

    async def _ask(self, members: AnnounceRound) -> str | None:
        """Send the members, with retries; return the reason for a failure or None."""
        message = RoundMembers(
            job_id=self.job_id,
            round=members.round,
            members=tuple(Member(peer=peer, samples=samples) for peer, samples in members.members),
            deadline_ms=int((self.timeout or UPDATES_TIMEOUT) * 1000),
        )

        def on_failure(error: NetError, _pause: float) -> None:
            if isinstance(error, UnsupportedProtocolError):
                raise error
            _log.warning("members of round %d could not be sent, retrying: %s", members.round, error)

        try:
            answer = await backoff.retry(
                lambda: rpc.call(self.endpoint, self.server, ROUND_MEMBERS, message), _RETRY_DELAYS, on_failure
            )
        except UnsupportedProtocolError:
            _log.info("the parameter server %s does not take member lists, it aggregates all updates", self.server)
            return None
        except NetError as error:
            return str(error)
        return None if answer.accepted else (answer.reason[:500] or "it does not accept them")
