"""Server side of the Kademlia DHT: every node answers FIND_NODE; gateways also keep records and providers.

Implements https://github.com/libp2p/specs/blob/master/kad-dht/README.md. Replaces py-libp2p's server, which keeps dead
peers, cannot replace a record, and resets the stream for keys of some lengths.
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

_log = logging.getLogger("hypha_net.kad")

CLOSEST: Final = 20
MAX_VALUE: Final = 64 << 10
DEFAULT_TTL: Final = 36 * 3600.0
MAX_KEY: Final = 1024
READ_TIMEOUT: Final = 30.0
MAX_STREAMS_PER_PEER: Final = 64
"""Streams of one peer that are served at once; further ones wait."""


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer."""

    peer: PeerId
    addresses: Callable[[], tuple[bytes, ...]]
    """Looks up its addresses as multiaddr bytes; called for the few peers that an answer names."""


class KadServer:
    """Answers the DHT requests of peers."""

    def __init__(
        self,
        known: Callable[[], Iterable[KnownPeer]],
        store: RecordStore | None,
        is_shareable: Callable[[bytes], bool] = lambda _address: True,
        providers: ProviderStore | None = None,
        may_publish: Callable[[PeerId], bool] = lambda _peer: True,
    ) -> None:
        self._known = known
        self._store = store
        self._is_shareable = is_shareable
        """Tells whether a peer's address may be given to others."""
        self._providers = providers or ProviderStore()
        self._may_publish = may_publish
        """Tells whether a peer's role allows it to publish records."""
        self._stream_limiter = PerPeerLimiter(MAX_STREAMS_PER_PEER)

    async def serve(self, stream: Stream) -> None:
        """Answer the requests on one stream until the peer ends it."""
        async with self._stream_limiter.acquire(stream.peer):
            await self._serve(stream)

    async def _serve(self, stream: Stream) -> None:
        while True:
            with anyio.move_on_after(READ_TIMEOUT) as scope:
                message = await read_message(stream, Message)
            if scope.cancelled_caught or message is None:
                return
            await anyio.lowlevel.checkpoint()  # nothing else here yields while further messages are buffered
            answer = self.answer(stream.peer, message)
            if answer is not None:
                await write_message(stream, answer)

    def answer(self, peer: PeerId, message: Any) -> Any:
        """Return the answer to a message, or None if its type has no answer."""
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
            _log.warning("record %r of %s was not stored", key, peer)
        elif publisher != peer.raw:  # replica; a record is accepted from its publisher only
            _log.debug("replica of record %r from %s ignored", key, peer)
        elif self._store.put(key, value, publisher, record.ttl or DEFAULT_TTL):
            _log.debug("record %r of %s stored", key, peer)

    def _may_put(self, peer: PeerId, key: bytes) -> bool:
        """Return whether `peer` may put records under `key`; only its publisher may put a signed record."""
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
        allowed = self._may_publish(peer) and any(provider.id == peer.raw for provider in message.provider_peers)
        key = bytes(message.key)
        if self._store is None or not allowed or not 0 < len(key) <= MAX_KEY or not self._providers.add(key, peer):
            _log.warning("%s was not added as provider of %r", peer, key)

    def _list_providers(self, key: bytes, answer: Any) -> None:
        """Add the providers that are connected or keep their signed record renewed: clients would wait for others."""
        if self._store is None:
            return
        connected = {known.peer: known.addresses for known in self._known()}
        for provider in self._providers.get(key):
            if provider in connected or self._store.get(heartbeat_key(provider, key)) is not None:
                known = connected[provider]() if provider in connected else ()
                addresses = [address for address in known if self._is_shareable(address)]
                answer.provider_peers.add(id=provider.raw, addrs=addresses, connection=int(provider in connected))

    def _add_closest(self, asking: PeerId, key: bytes, answer: Any) -> None:
        target = int.from_bytes(hashlib.sha256(key).digest(), "big")
        others = [known for known in self._known() if known.peer != asking]
        for known in sorted(others, key=lambda known: _key_space_position(known.peer.raw) ^ target):
            if addresses := [address for address in known.addresses() if self._is_shareable(address)]:
                answer.closer_peers.add(id=known.peer.raw, addrs=addresses, connection=1)
                if len(answer.closer_peers) == CLOSEST:
                    return


@lru_cache(4096)
def _key_space_position(peer: bytes) -> int:
    """Return a peer's position in the key space, for the XOR distance."""
    return int.from_bytes(hashlib.sha256(peer).digest(), "big")
