"""Client side of the Kademlia DHT: every look-up is one question to each gateway.

Implements https://github.com/libp2p/specs/blob/master/kad-dht/README.md without iterative look-ups: gateways know every
node, so an unresponsive peer elsewhere delays nothing. A record is put under its plain key, where every implementation
finds the newest, and a second time, signed, under a key of its publisher (`hypha_proto.signed_records`), with the
publisher as provider of the plain key: that way all publishers of a key are found, and only live ones.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hypha_net._libp2p.kad.messages import PROTOCOL, Kind, Message
from hypha_net._libp2p.kad.server import CLOSEST, KadServer
from hypha_net._libp2p.kad.store import MAX_PROVIDERS, sequence
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.endpoint import Endpoint, Record
from hypha_net.errors import NetError, StreamResetError, UnreachableError
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import heartbeat_key, signed_bytes, split_heartbeat

ASK_TIMEOUT: Final = 5.0
GRACE: Final = 0.5
"""Seconds to wait for the other gateways once one has answered."""

MAX_PART_BITS: Final = 5
"""Halvings of the key space in a search for all neighbours: at most 63 requests, which find some 600 peers."""
MAX_CONCURRENT_LOOKUPS: Final = 8

Answers = Mapping[PeerId, Any]
"""Answers by gateway; None for a message that has no answer."""
PeerAddresses = dict[PeerId, list[bytes]]
"""Addresses of peers, as multiaddr bytes."""


class KadClient:
    """Puts and finds records and peers at the gateways."""

    def __init__(
        self,
        endpoint: Endpoint,
        gateways: Callable[[], Iterable[PeerId]],
        sign: Callable[[bytes], bytes],
        local: KadServer | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._gateways = gateways
        self._sign = sign
        """Signs with the key that belongs to this node's peer id."""
        self._local = local
        """The DHT server of a gateway, which is asked like the other gateways."""

    async def put(self, key: bytes, value: bytes, ttl: float, gateways: Sequence[PeerId] | None = None) -> None:
        """Store a record at `gateways`, by default all. Raises `UnreachableError` when none stored it."""
        own = self._endpoint.peer_id
        signature = self._sign(signed_bytes(own, key, value))
        await self._ask_all(self._record(key, value, ttl), ASK_TIMEOUT, gateways)
        provider = Message(type=Kind.ADD_PROVIDER, key=key)
        provider.provider_peers.add(id=own.raw)
        await self._ask_all(provider, ASK_TIMEOUT, gateways)
        await self._ask_all(self._record(heartbeat_key(own, key), signature + value, ttl), ASK_TIMEOUT, gateways)

    def _record(self, key: bytes, value: bytes, ttl: float) -> Any:
        message = Message(type=Kind.PUT_VALUE, key=key)
        message.record.key, message.record.value = key, value
        message.record.publisher, message.record.ttl = self._endpoint.peer_id.raw, max(1, int(ttl))
        return message

    async def find(self, key: bytes, timeout: float) -> list[Record]:
        """Find the records of a key, one per publisher, highest `seq` first.

        A publisher's signed record replaces the one under the plain key.

        Raises:
            UnreachableError: no gateway answered.
        """
        deadline = anyio.current_time() + timeout
        found: dict[PeerId | None, Record] = {}
        signed: dict[PeerId | None, Record] = {}

        async def find_plain() -> None:
            answers = await self._ask_all(Message(type=Kind.GET_VALUE, key=key), timeout)
            for record in _records(answers, key):
                publisher = _peer_id(record.publisher)
                old = found.get(publisher)
                if old is None or sequence(old.value) < sequence(record.value):
                    found[publisher] = Record(key, bytes(record.value), publisher)

        async def find_signed() -> None:
            try:
                answers = await self._ask_all(Message(type=Kind.GET_PROVIDERS, key=key), timeout)
            except UnreachableError:
                return  # find_plain raises the same error
            providers = _providers(answers)
            async with anyio.create_task_group() as tasks:
                for provider in list(providers)[:MAX_PROVIDERS]:
                    left = max(0.1, deadline - anyio.current_time())
                    tasks.start_soon(self._find_signed_record, provider, key, left, list(answers), signed)

        failure: UnreachableError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(find_signed)
            try:
                await find_plain()
            except UnreachableError as error:
                failure = error
        if failure is not None:
            raise failure
        found.update(signed)
        return sorted(found.values(), key=lambda record: -sequence(record.value))

    async def _find_signed_record(
        self, provider: PeerId, key: bytes, timeout: float, gateways: list[PeerId], found: dict[PeerId | None, Record]
    ) -> None:
        """Add a provider's newest signed record to `found`, if there is one with a valid signature."""
        wanted = heartbeat_key(provider, key)
        try:
            answers = await self._ask_all(Message(type=Kind.GET_VALUE, key=wanted), timeout, gateways)
        except UnreachableError:
            return
        for record in _records(answers, wanted):
            signature, value = split_heartbeat(bytes(record.value))
            if not _is_signed(provider, key, value, signature):
                continue
            old = found.get(provider)
            if old is None or sequence(old.value) < sequence(value):
                found[provider] = Record(key, value, provider)

    async def find_addresses(self, peer: PeerId, timeout: float) -> list[bytes]:
        """Return the addresses of a peer that gateways know, as multiaddr bytes."""
        answers = await self._ask_all(Message(type=Kind.FIND_NODE, key=peer.raw), timeout)
        found: dict[bytes, None] = {}
        for answer in answers.values():
            for closer in answer.closer_peers:
                if closer.id == peer.raw:
                    found.update(dict.fromkeys(bytes(address) for address in closer.addrs[:32]))
        return list(found)

    async def closest_peers(self, timeout: float, gateways: Iterable[PeerId] | None = None) -> PeerAddresses:
        """Return the peers closest to this node that `gateways` know, by default all gateways."""
        answers = await self._ask_all(Message(type=Kind.FIND_NODE, key=self._endpoint.peer_id.raw), timeout, gateways)
        return self._named_peers(answers.values())

    async def neighbours(self, gateways: Collection[PeerId], timeout: float) -> PeerAddresses:
        """Return the peers that `gateways` know.

        An answer names the 20 peers closest to its key, so the key space is halved until an answer covers its part:
        if it names fewer peers, or one outside the part. See `MAX_PART_BITS` for the limit.

        Raises:
            UnreachableError: no gateway answered.
        """
        found: PeerAddresses = {}
        parts, answered = [""], False
        with anyio.move_on_after(timeout):
            while parts and len(parts[0]) <= MAX_PART_BITS:
                answers = await self._find_in_parts(parts, gateways, timeout)
                answered = answered or bool(answers)
                for each in answers.values():
                    found.update(self._named_peers(each.values()))
                parts = [part + bit for part, each in answers.items() if not _covers(each, part) for bit in "01"]
        if not answered:
            raise UnreachableError("no gateway answered a request for its neighbours")
        return found

    async def _find_in_parts(
        self, parts: Iterable[str], gateways: Collection[PeerId], timeout: float
    ) -> dict[str, Answers]:
        """Ask for peers in parts of the key space; return the answers by part."""
        answers: dict[str, Answers] = {}
        limiter = anyio.CapacityLimiter(MAX_CONCURRENT_LOOKUPS)

        async def ask(part: str) -> None:
            message = Message(type=Kind.FIND_NODE, key=_key_in(part))
            async with limiter:
                with suppress(UnreachableError):
                    answers[part] = await self._ask_all(message, timeout, gateways)

        async with anyio.create_task_group() as tasks:
            for part in parts:
                tasks.start_soon(ask, part)
        return answers

    def _named_peers(self, answers: Iterable[Any]) -> PeerAddresses:
        found: PeerAddresses = {}
        for answer in answers:
            for closer in answer.closer_peers[: 4 * CLOSEST]:
                if (peer := _peer_id(closer.id)) is not None and peer != self._endpoint.peer_id:
                    found.setdefault(peer, [bytes(address) for address in closer.addrs[:32]])
        return found

    async def _ask_all(self, message: Any, timeout: float, gateways: Iterable[PeerId] | None = None) -> Answers:
        """Send a message to `gateways`, by default all that are connected; return their answers."""
        answers: dict[PeerId, Any] = {}
        failures: list[str] = []
        own = self._endpoint.peer_id
        if self._local is not None:
            answers[own] = self._local.answer(own, message)

        async def ask(gateway: PeerId) -> None:
            try:
                answers[gateway] = await self._ask(gateway, message, timeout)
            except NetError as error:
                failures.append(f"{gateway}: {error}")
                return
            tasks.cancel_scope.deadline = min(tasks.cancel_scope.deadline, anyio.current_time() + GRACE)

        others = [peer for peer in (self._gateways() if gateways is None else gateways) if peer != own]
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + timeout
            for gateway in others:
                tasks.start_soon(ask, gateway)
        failures += [f"{gateway}: no answer within {timeout:g} s" for gateway in others if gateway not in answers]
        if not answers:
            raise UnreachableError("no gateway answered: " + ("; ".join(failures) or "none is connected"))
        return answers

    async def _ask(self, gateway: PeerId, message: Any, timeout: float) -> Any:
        stream = await self._endpoint.open_stream(gateway, [PROTOCOL], timeout=timeout)
        try:
            await write_message(stream, message)
            await stream.send_eof()
            if message.type == Kind.ADD_PROVIDER:
                return None
            answer = await read_message(stream, Message)
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        if answer is None or answer.type != message.type:
            raise StreamResetError("unexpected answer of the gateway")
        return answer


def _covers(answers: Answers, part: str) -> bool:
    """Return whether every answer names all peers that its gateway knows in a part of the key space."""
    return all(
        len(answer.closer_peers) < CLOSEST or any(not _is_in(closer.id, part) for closer in answer.closer_peers)
        for answer in answers.values()
    )


def _is_in(key: bytes, part: str) -> bool:
    """Return whether the SHA-256 of `key` begins with the bits of `part`, at most `MAX_PART_BITS`."""
    return f"{hashlib.sha256(key).digest()[0]:08b}".startswith(part)


def _key_in(part: str) -> bytes:
    """Return some key in a part of the key space."""
    return next(key for number in itertools.count() if _is_in(key := number.to_bytes(4, "big"), part))


def _records(answers: Answers, key: bytes) -> list[Any]:
    return [answer.record for answer in answers.values() if answer.HasField("record") and answer.record.key == key]


def _providers(answers: Answers) -> dict[PeerId, None]:
    named = (_peer_id(peer.id) for answer in answers.values() for peer in answer.provider_peers[:MAX_PROVIDERS])
    return dict.fromkeys(peer for peer in named if peer is not None)


def _is_signed(publisher: PeerId, key: bytes, value: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(publisher.public_key).verify(signature, signed_bytes(publisher, key, value))
    except (InvalidSignature, ValueError):
        return False
    return True


def _peer_id(raw: bytes) -> PeerId | None:
    try:
        return PeerId(bytes(raw))
    except InvalidIdError:
        return None
