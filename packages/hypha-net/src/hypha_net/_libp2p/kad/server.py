"""The directory's answering half: every node answers FIND_NODE, gateways keep records and providers too.

After it: `kad_store`, where a gateway keeps them. The stock server keeps dead peers, cannot replace a record, and
resets the stream for keys of some lengths.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import anyio
import anyio.lowlevel

from hypha_net._libp2p.kad.messages import Kind, Message
from hypha_net._libp2p.kad.store import ProviderStore, RecordStore
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.endpoint import Stream
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import heartbeat_key, publisher_named

_log = logging.getLogger("hypha_net.dataset_directory")

CLOSEST: Final = 20
MAX_VALUE: Final = 64 << 10
DEFAULT_TTL: Final = 36 * 3600.0
MAX_KEY: Final = 1024
READ_TIMEOUT: Final = 30.0
STREAMS_AT_ONCE: Final = 64
"""Streams of one peer on which it is answered; the others wait."""


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer."""

    peer: PeerId
    addresses: Callable[[], tuple[bytes, ...]]
    """Looks up those it has, as multiaddr bytes; an answer names a few peers of many."""


class KadServer:
    """Answers Kademlia questions of peers."""

    def __init__(
        self,
        known: Callable[[], Iterable[KnownPeer]],
        store: RecordStore | None,
        passes: Callable[[bytes], bool] = lambda _address: True,
        providers: ProviderStore | None = None,
        may_publish: Callable[[PeerId], bool] = lambda _peer: True,
    ) -> None:
        self._known = known
        self._store = store
        self._passes = passes
        """Whether a peer's address is told to others."""
        self._providers = providers or ProviderStore()
        self._may_publish = may_publish
        """Whether a peer's role lets it publish datasets."""
        self._turns = PerPeerLimiter(STREAMS_AT_ONCE)

    async def serve(self, stream: Stream) -> None:
        """Answer every message of one stream until the peer ends it."""
        async with self._turns.acquire(stream.peer):
            await self._serve(stream)

    async def _serve(self, stream: Stream) -> None:
        while True:
            with anyio.move_on_after(READ_TIMEOUT) as scope:
                message = await read_message(stream, Message)
            if scope.cancelled_caught or message is None:
                return
            await anyio.lowlevel.checkpoint()  # nothing else here waits while more messages have come already
            answer = self.answer(stream.peer, message)
            if answer is not None:
                await write_message(stream, answer)

    def answer(self, peer: PeerId, message: Any) -> Any:
        """The answer to a message, none if it gets none."""
        if message.type == Kind.ADD_PROVIDER:
            self._add_provider(peer, message)
            return None
        answer = Message(type=message.type, key=message.key)
        if message.type == Kind.PUT_VALUE:
            self._put(peer, message)
            answer.record.CopyFrom(message.record)
        elif message.type == Kind.GET_VALUE:
            self._get(message.key, answer)
        elif message.type == Kind.GET_PROVIDERS:
            self._list_providers(message.key, answer)
        if message.type in (Kind.GET_VALUE, Kind.GET_PROVIDERS, Kind.FIND_NODE):
            self._add_closest(peer, message.key, answer)
        return answer

    def _put(self, peer: PeerId, message: Any) -> None:
        record = message.record
        key, value, publisher = bytes(record.key), bytes(record.value), bytes(record.publisher or peer.raw)
        fits = key == message.key and 0 < len(key) <= MAX_KEY and len(value) <= MAX_VALUE
        if self._store is None or not fits or not self._may_put(peer, key):
            _log.warning("record %r of %s is not stored here", key[:60], peer)
        elif publisher != peer.raw:  # what its publisher has put here as well needs no replica, and nothing else counts
            _log.debug("%s brings record %r of somebody else, which is left out", peer, key[:60])
        elif self._store.put(key, value, publisher, record.ttl or DEFAULT_TTL):
            _log.debug("record %r of %s stored", key[:60], peer)

    def _may_put(self, peer: PeerId, key: bytes) -> bool:
        """Whether `peer` may put records under `key`: a heartbeat's is for its publisher alone."""
        try:
            named = publisher_named(key)
        except InvalidIdError:
            return False
        return self._may_publish(peer) and named in (None, peer)

    def _get(self, key: bytes, answer: Any) -> None:
        if self._store is not None and (stored := self._store.get(key)) is not None:
            answer.record.key = key
            answer.record.value = stored.value
            answer.record.publisher = stored.publisher
            answer.record.ttl = self._store.remaining(stored)

    def _add_provider(self, peer: PeerId, message: Any) -> None:
        own = self._may_publish(peer) and any(provider.id == peer.raw for provider in message.provider_peers)
        key = bytes(message.key)
        if self._store is None or not own or not 0 < len(key) <= MAX_KEY or not self._providers.add(key, peer):
            _log.warning("%s is not noted as provider of %r", peer, key[:60])

    def _list_providers(self, key: bytes, answer: Any) -> None:
        """Providers whose heartbeat goes on, or that are connected: nobody waits for one that is dead."""
        if self._store is None:
            return
        connected = {known.peer: known.addresses for known in self._known()}
        for provider in self._providers.get(key):
            if provider in connected or self._store.get(heartbeat_key(provider, key)) is not None:
                known = connected[provider]() if provider in connected else ()
                addresses = [address for address in known if self._passes(address)]
                answer.provider_peers.add(id=provider.raw, addrs=addresses, connection=int(provider in connected))

    def _add_closest(self, asking: PeerId, key: bytes, answer: Any) -> None:
        target = int.from_bytes(hashlib.sha256(key).digest(), "big")
        others = [known for known in self._known() if known.peer != asking]
        for known in sorted(others, key=lambda known: _place(known.peer.raw) ^ target):
            if addresses := [address for address in known.addresses() if self._passes(address)]:
                answer.closer_peers.add(id=known.peer.raw, addrs=addresses, connection=1)
                if len(answer.closer_peers) == CLOSEST:
                    return


@lru_cache(4096)
def _place(peer: bytes) -> int:
    """Where a peer is in the space of keys."""
    return int.from_bytes(hashlib.sha256(peer).digest(), "big")
