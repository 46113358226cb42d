"""Asks workers why they make no offer, and reports it while a search goes on and when it has failed.

The I/O around `shortage`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import anyio

from hypha_net import rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.leases import WHY_NOT, Rejection, WhyNot
from hypha_proto.offers import WORKER_REQUESTS, WorkerRequest
from hypha_scheduler.allocation.auction import Auction, RoleRequest
from hypha_scheduler.allocation.shortage import (
    Answers,
    LeaseCount,
    Shortage,
    count_reasons,
    describe_peers,
    hint_for_unlisted,
    may_become_suitable,
)

if TYPE_CHECKING:
    from hypha_scheduler.allocation.allocator import Allocator

_log = logging.getLogger(__name__)

FIRST_REPORT: Final = 1.0
"""Seconds of a search after which workers are asked for the first time why they make no offer."""
REPORT_INTERVAL: Final = 5.0
"""Seconds between questions to workers why they make no offer."""
GROWTH_INTERVAL: Final = 60.0
"""The same while the job goes on without those it lacks."""
REPEAT_INTERVAL: Final = 30.0
"""Seconds after which an unchanged reason is reported again while the job waits."""
_TIMEOUT: Final = 3.0
_MAX_PEERS_ASKED: Final = 32
_CONTENTION_TIMEOUT: Final = 1.0
_FOUND_PEERS: Final = 20
"""As many peers as a gateway names at most: with fewer it has named all."""


def candidates(endpoint: Endpoint) -> list[PeerId]:
    """Return the peers that may make offers: subscribers whose certificate does not state a role but worker."""
    known = endpoint.connected_peers()
    peers = endpoint.topic_peers(WORKER_REQUESTS.name)
    return [peer for peer in peers if peer not in known or known[peer].role in (None, "worker")]


def all_candidates(endpoint: Endpoint) -> list[PeerId] | None:
    """Return the peers that may make offers, or None if there may be others: a gateway forwards requests to them."""
    found = candidates(endpoint)
    return found if len(found) == len(endpoint.topic_peers(WORKER_REQUESTS.name)) else None


async def find_candidates(endpoint: Endpoint, timeout: float) -> list[PeerId]:
    """Return the peers that may make offers, then others: workers without an offer are often not connected."""
    found: list[PeerId] = []
    try:
        found = await endpoint.find_peers(timeout=timeout)
    except NetError as error:  # no gateway answers: those that are known are asked all the same
        _log.debug("cannot look up further workers to ask: %s", error)
    return list(dict.fromkeys((*sorted(candidates(endpoint)), *found)))


@dataclass(slots=True)
class ShortageReport:
    """Why roles of one search lack workers."""

    allocator: Allocator
    """The search."""
    endpoint: Endpoint
    auction: Auction

    @property
    def is_below_minimum(self) -> bool:
        """Whether the job holds less than its minimum of a role."""
        return any(self._leases(request).needed for request in self.allocator.demand)

    async def watch(self) -> None:
        """Report why workers are missing when it changes, and regularly while the job waits, until cancelled."""
        reported: dict[str, tuple[Shortage, float]] = {}
        await anyio.sleep(FIRST_REPORT)
        while True:
            for shortage in self._count(await self._ask()):
                if self._is_news(shortage, reported.get(shortage.role)):
                    reported[shortage.role] = (shortage, anyio.current_time())
                    _log.info("waiting for workers: %s: %s", shortage.role, shortage)
                    self.allocator.on_shortage(shortage)
            await anyio.sleep(REPORT_INTERVAL if self.allocator.is_needed() else GROWTH_INTERVAL)

    def _is_news(self, shortage: Shortage, last: tuple[Shortage, float] | None) -> bool:
        """Return whether to report a shortage after the one that was reported last, and when.

        An incomplete set that is released for others and sought again is no change.
        """
        if last is None or shortage.counts != last[0].counts or shortage.largest != last[0].largest:
            return True
        return self.allocator.is_needed() and anyio.current_time() >= last[1] + REPEAT_INTERVAL

    def _leases(self, request: RoleRequest) -> LeaseCount:
        found = sum(offer.role == request.role for offer in self.auction.held)
        return LeaseCount(self.allocator.holding.get(request.role, 0) + found, request.count, request.minimum)

    async def explain(self, timeout: float) -> str:
        """Describe for the job's owner why not enough workers were found within `timeout` seconds."""
        counts = [(request.role, self._leases(request)) for request in self.allocator.demand]
        found = ", ".join(f"{count.held} of {count.wanted} for {role}" for role, count in counts)
        first = f"not enough workers within {timeout:g} s: {found}"
        if not self.endpoint.topic_peers(WORKER_REQUESTS.name):
            return f"{first}; no peer subscribes to worker requests: is a worker running?"
        answers = await self._ask()
        lines = [first]
        for shortage in self._count(answers):
            self.allocator.on_shortage(shortage)
            lines.append(f"{shortage.role}: {shortage}")
        lines += describe_peers(answers, self._held())
        lines += [hint_for_unlisted(request.role, request.bid) for request in self.auction.open_requests]
        return "\n  ".join(lines)

    async def is_contended(self) -> bool:
        """Return whether other schedulers may compete for the workers of this search, as far as can be told.

        Not so only if all peers are known and have answered, and none would make an offer if others released leases.
        """
        try:
            found = await self.endpoint.find_peers(timeout=_CONTENTION_TIMEOUT)
        except NetError:
            return True
        taken = {offer.peer for offer in (*self.auction.held, *self.auction.unanswered)}
        peers = {*candidates(self.endpoint), *found} - taken
        if len(found) >= _FOUND_PEERS or len(peers) > _MAX_PEERS_ASKED:
            return True  # there may be more
        contended: list[PeerId] = []
        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(self._check_contention, peer, contended)
        return bool(contended)

    async def _check_contention(self, peer: PeerId, contended: list[PeerId]) -> None:
        """Add `peer` to `contended` if it is a worker that others may hold."""
        try:
            for role_request in self.auction.open_requests:
                question = WhyNot(request=self.allocator.requests[role_request.role])
                answer = await rpc.call(self.endpoint, peer, WHY_NOT, question, timeout=_CONTENTION_TIMEOUT)
                if may_become_suitable(answer.rejections):
                    contended.append(peer)
        except UnsupportedProtocolError:
            pass  # a node of another role
        except NetError:
            contended.append(peer)

    def _held(self) -> dict[PeerId, str]:
        return {offer.peer: offer.role for offer in self.auction.held}

    def _count(self, answers: Answers) -> list[Shortage]:
        held, demand = self._held(), {request.role: request for request in self.allocator.demand}
        return [
            replace(
                count_reasons(request.role, request.spec.resources, answers, held),
                leases=self._leases(demand.get(request.role, request)),
            )
            for request in self.auction.open_requests
        ]

    async def _ask(self) -> dict[tuple[PeerId, str], tuple[Rejection, ...]]:
        """Ask workers about the open requests; return their answers, and why offers were rejected here."""
        answers: dict[tuple[PeerId, str], tuple[Rejection, ...]] = {}
        open_roles = {request.role for request in self.auction.open_requests}
        requests = {role: request for role, request in self.allocator.requests.items() if role in open_roles}
        async with anyio.create_task_group() as tasks:
            peers = await find_candidates(self.endpoint, _TIMEOUT) if requests else ()
            for peer in peers[:_MAX_PEERS_ASKED]:
                for role, request in requests.items():
                    tasks.start_soon(self._ask_peer, peer, role, request, answers)
        return answers | self.auction.rejections

    async def _ask_peer(
        self, peer: PeerId, role: str, request: WorkerRequest, answers: dict[tuple[PeerId, str], tuple[Rejection, ...]]
    ) -> None:
        try:
            answer = await rpc.call(self.endpoint, peer, WHY_NOT, WhyNot(request=request), timeout=_TIMEOUT)
            answers[peer, role] = answer.rejections
        except NetError as error:
            _log.debug("%s did not answer why it made no offer: %s", peer, error)
