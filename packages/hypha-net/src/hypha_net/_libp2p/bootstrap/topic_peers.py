"""Connects to peers of this node's topics that gossip through the gateways does not serve.

A gateway that is not in a topic forwards none of its messages: its neighbours are dialled. Started by `endpoint`, told
of gateways by `gateways`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

import anyio
import anyio.abc

from hypha_net._libp2p.dial.dialer import Dialer
from hypha_net._libp2p.gossipsub.subscriptions import Subscriptions
from hypha_net._libp2p.kad.client import ASK_TIMEOUT, KadClient, PeerAddresses
from hypha_net.backoff import Backoff
from hypha_net.errors import NetError, UnreachableError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.topic_peers")

ANNOUNCEMENT_TIMEOUT: Final = 2.0
"""Seconds that a gateway has to announce its topics."""
INTERVAL: Final = 30.0
"""Seconds between two searches for peers of topics that this node has joined."""
PUBLISH_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between two searches while messages are published; the last repeats, and a search that finds someone new
begins them again."""
PUBLISHED_TTL: Final = 60.0
"""Seconds after its last message for which a topic counts as published to, as gossipsub's fanout TTL."""
TOPIC_CHECK: Final = 2.0
"""Seconds between checks whether a topic has been joined."""
SEARCH_TIMEOUT: Final = 20.0
ADDRESS_TIMEOUT: Final = 3.0
PEER_TIMEOUT: Final = 6.0
PEER_PAUSES: Final = (5.0, 15.0, 30.0, 60.0)
"""Seconds for which a peer that could not be reached is left out."""
MAX_CONCURRENT_DIALS: Final = 16
MAX_PEERS: Final = 256
"""Peers that one search dials."""


class TopicPeers:
    """The search for topic peers of one endpoint."""

    def __init__(self, dialer: Dialer, dht: KadClient, subscriptions: Subscriptions) -> None:
        self._dialer = dialer
        self._dht = dht
        self._subscriptions = subscriptions
        self._gateways: set[PeerId] = set()
        """Connected gateways whose topics are known."""
        self._waiting = 0
        """Connected gateways whose topics are not known yet."""
        self._published: dict[str, float] = {}
        """Topics that were published to, and when last."""
        self._failures: Backoff[PeerId] = Backoff(PEER_PAUSES)
        self._requested = False
        """Whether a message has been published since the last search began."""
        self._is_searching = False
        self._searches = 0
        """Searches in succession that connected no one new."""
        self._searched_at = float("-inf")
        self._searched_for: tuple[frozenset[str], frozenset[PeerId]] = (frozenset(), frozenset())
        """Topics and gateways of the last search."""
        self._changed = anyio.Event()

    # ---------------------------------------------------------------------------------------------- what is wanted

    async def use_gateway(self, gateway: PeerId) -> None:
        """Search at a connected gateway, until cancelled when it has disconnected."""
        self._waiting += 1
        try:
            with anyio.move_on_after(ANNOUNCEMENT_TIMEOUT):  # py-libp2p has no event for a peer's subscriptions
                while not self._subscriptions.has_announced_topics(gateway):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            self._gateways.add(gateway)
        finally:
            self._waiting -= 1
            self._notify()
        try:
            await anyio.sleep_forever()
        finally:
            self._gateways.discard(gateway)

    def note_publish(self, topic: str) -> None:
        """Search for peers of `topic` in the background, at once or when the pause after the last search is over."""
        self._published[topic] = anyio.current_time()
        if not self._requested:
            self._requested = True
            self._notify()

    async def connect(self, topic: str, timeout: float) -> None:
        """See `Endpoint.connect_subscribers`."""
        self.note_publish(topic)
        with anyio.move_on_after(timeout):
            while self._waiting or self._is_searching or self._due_in() <= 0:
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _published_topics(self) -> frozenset[str]:
        oldest = anyio.current_time() - PUBLISHED_TTL
        self._published = {topic: at for topic, at in self._published.items() if at > oldest}
        return frozenset(self._published)

    # ------------------------------------------------------------------------------------------------------ when

    async def run(self) -> None:
        """Search whenever it is due, until cancelled."""
        while True:
            while (seconds := self._due_in()) > 0:
                with anyio.move_on_after(min(seconds, TOPIC_CHECK)):
                    await self._changed.wait()
            await self._search()

    def _due_in(self) -> float:
        """Return the seconds until the next search."""
        joined, published = frozenset(self._subscriptions.topics()), self._published_topics()
        topics, gateways = self._searched_for
        if not self._gateways or not joined | published:
            return float("inf")
        if not joined | published <= topics or not self._gateways <= gateways:
            return 0.0
        pause = INTERVAL if joined else float("inf")
        if self._requested:
            pause = min(pause, PUBLISH_PAUSES[min(self._searches, len(PUBLISH_PAUSES) - 1)])
        return self._searched_at + pause - anyio.current_time()

    async def _search(self) -> None:
        published = self._published_topics()
        topics, gateways = published | set(self._subscriptions.topics()), frozenset(self._gateways)
        self._searched_for, self._requested, self._is_searching = (topics, gateways), False, True
        connected = 0
        try:
            with anyio.move_on_after(SEARCH_TIMEOUT):
                connected = await self._connect_all(await self._find(topics, bool(published), gateways))
        except UnreachableError as error:
            _log.info("peers of %s not found: %s", ", ".join(sorted(topics)), error)
        finally:
            self._searches = 0 if connected else self._searches + 1
            self._searched_at, self._is_searching = anyio.current_time(), False
            self._notify()

    # ------------------------------------------------------------------------------------------------------ whom

    async def _find(self, topics: Collection[str], publishes: bool, gateways: Iterable[PeerId]) -> PeerAddresses:
        """Return the peers to connect to."""
        members = frozenset[PeerId]().union(*map(self._subscriptions.peers, topics))
        silent = [gateway for gateway in gateways if gateway not in members]
        if not silent:
            return {}
        if publishes:
            return await self._dht.neighbours(silent, ASK_TIMEOUT)
        return await self._dht.closest_peers(ASK_TIMEOUT, silent)

    async def _connect_all(self, found: PeerAddresses) -> int:
        """Dial the peers that are not connected; return how many have been reached."""
        wanted = [
            peer for peer in found if self._dialer.connection(peer) is None and not self._failures.remaining(peer)
        ]
        limiter = anyio.CapacityLimiter(MAX_CONCURRENT_DIALS)
        async with anyio.create_task_group() as tasks:
            for peer in wanted[:MAX_PEERS]:
                tasks.start_soon(self._connect_peer, peer, found[peer], limiter)
        return sum(self._dialer.connection(peer) is not None for peer in wanted)

    async def _connect_peer(self, peer: PeerId, addresses: Iterable[bytes], limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            with anyio.move_on_after(PEER_TIMEOUT):
                await self._dial(peer, list(addresses))
        if self._dialer.connection(peer) is None:
            self._failures.record_failure(peer)

    async def _dial(self, peer: PeerId, addresses: Collection[bytes]) -> None:
        """Dial the addresses that a gateway named; if none answers, connect through a relay."""
        direct = self._dialer.filter_dialable(addresses)
        for address in direct:
            try:
                with anyio.fail_after(ADDRESS_TIMEOUT):
                    await self._dialer.connect_to_advertised(peer, address)
                return
            except (NetError, TimeoutError) as error:
                _log.debug("peer %s at %s: %s", peer, address, error)
        if len(direct) < len(addresses):
            try:
                await self._dialer.get_or_connect(peer)
            except NetError as error:
                _log.debug("peer %s: %s", peer, error)
