"""The directory: every node answers FIND_NODE, gateways keep records too, and a client asks gateways.

With gateways as the only servers of records a look-up is one question to each: a frozen peer elsewhere costs nothing.
The stock server keeps dead peers, cannot replace a record, and resets the stream for keys of some lengths.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from hypha_net._libp2p.framing import read_message, write_message
from hypha_net._libp2p.kad_messages import PROTOCOL, Kind, Message
from hypha_net.endpoint import Endpoint, Record, Stream
from hypha_net.errors import NetError, StreamResetError, UnreachableError
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.directory")

CLOSEST: Final = 20
MAX_RECORDS: Final = 16_384
MAX_RECORDS_OF_PEER: Final = 512
MAX_STORED: Final = 64 << 20
"""Bytes of keys and values that a gateway keeps in all."""
MAX_VALUE: Final = 64 << 10
MAX_TTL: Final = 48 * 3600.0
DEFAULT_TTL: Final = 36 * 3600.0
MAX_KEY: Final = 1024
READ_TIMEOUT: Final = 30.0
ASK_TIMEOUT: Final = 5.0
GRACE: Final = 0.5
"""Seconds that the other gateways have once one has answered."""


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A connected peer and the addresses it has, as multiaddr bytes."""

    peer: PeerId
    addresses: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record and when it ends, on the wall clock so that it survives a restart."""

    value: bytes
    publisher: bytes
    expires: float


class RecordStore:
    """Records by key, newest wins; kept in a file if there is a folder for it."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / "dht-records.json"
        self._clock = clock
        self._records: dict[bytes, StoredRecord] = {}
        self._load()

    def get(self, key: bytes) -> StoredRecord | None:
        """The record of a key, unless it has expired."""
        record = self._records.get(key)
        if record is not None and record.expires <= self._clock():
            del self._records[key]
            return None
        return record

    def put(self, key: bytes, value: bytes, publisher: bytes, ttl: float) -> bool:
        """Store a record; false if a newer one of the same publisher is there, or there is no room."""
        old = self.get(key)
        if old is not None and old.publisher == publisher and sequence(old.value) > sequence(value):
            return False
        if not self._has_room(key, value, publisher):
            self._expire()
            if not self._has_room(key, value, publisher):
                return False
        self._records[key] = StoredRecord(value, publisher, self._clock() + min(ttl, MAX_TTL))
        self._save()
        return True

    def remaining(self, record: StoredRecord) -> int:
        """Whole seconds that a record has left, at least one."""
        return max(1, int(record.expires - self._clock()))

    def _has_room(self, key: bytes, value: bytes, publisher: bytes) -> bool:
        others = [(k, r) for k, r in self._records.items() if k != key]
        stored = sum(len(k) + len(r.value) for k, r in others) + len(key) + len(value)
        of_peer = sum(r.publisher == publisher for _, r in others)
        return len(others) < MAX_RECORDS and of_peer < MAX_RECORDS_OF_PEER and stored <= MAX_STORED

    def _expire(self) -> None:
        now = self._clock()
        self._records = {key: record for key, record in self._records.items() if record.expires > now}

    def _save(self) -> None:
        if self._path is None:
            return
        plain = [
            [base64.b64encode(part).decode() for part in (key, record.value, record.publisher)] + [record.expires]
            for key, record in self._records.items()
        ]
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(plain))
        temporary.replace(self._path)

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            for *parts, expires in json.loads(self._path.read_text()):
                key, value, publisher = (base64.b64decode(part, validate=True) for part in parts)
                self._records[key] = StoredRecord(value, publisher, float(expires))
        except (ValueError, TypeError) as error:
            self._records.clear()
            _log.warning("%s is not readable and is begun anew: %s", self._path, error)


def sequence(value: bytes) -> int:
    """The `seq` of a record's JSON value; 0 when it has none."""
    try:
        number = json.loads(value).get("seq", 0)
    except (ValueError, AttributeError, RecursionError):
        return 0
    return number if type(number) is int else 0


class DirectoryServer:
    """Answers Kademlia questions of peers."""

    def __init__(
        self,
        known: Callable[[], Iterable[KnownPeer]],
        store: RecordStore | None,
        passes: Callable[[bytes], bool] = lambda _address: True,
    ) -> None:
        self._known = known
        self._store = store
        self._passes = passes
        """Whether a peer's address is told to others."""

    async def serve(self, stream: Stream) -> None:
        """Answer every message of one stream until the peer ends it."""
        while True:
            with anyio.move_on_after(READ_TIMEOUT) as scope:
                message = await read_message(stream, Message)
            if scope.cancelled_caught or message is None:
                return
            answer = self.answer(stream.peer, message)
            if answer is not None:
                await write_message(stream, answer)

    def answer(self, peer: PeerId, message: Any) -> Any:
        """The answer to a message, none if it gets none."""
        if message.type == Kind.ADD_PROVIDER:
            return None
        answer = Message(type=message.type, key=message.key)
        if message.type == Kind.PUT_VALUE:
            self._put(peer, message)
            answer.record.CopyFrom(message.record)
        elif message.type == Kind.GET_VALUE:
            self._get(message.key, answer)
        if message.type in (Kind.GET_VALUE, Kind.GET_PROVIDERS, Kind.FIND_NODE):
            self._add_closest(peer, message.key, answer)
        return answer

    def _put(self, peer: PeerId, message: Any) -> None:
        record = message.record
        publisher = record.publisher or peer.raw
        fits = record.key == message.key and 0 < len(record.key) <= MAX_KEY and len(record.value) <= MAX_VALUE
        known = None if self._store is None else self._store.get(record.key)
        own = publisher == peer.raw or (known is not None and known.publisher == publisher)
        if self._store is None or not fits or not own:
            _log.warning("record %r of %s is not stored here", bytes(record.key[:60]), peer)
        elif self._store.put(bytes(record.key), bytes(record.value), bytes(publisher), record.ttl or DEFAULT_TTL):
            _log.info("record %r of %s stored", bytes(record.key[:60]), peer)

    def _get(self, key: bytes, answer: Any) -> None:
        if self._store is not None and (stored := self._store.get(key)) is not None:
            answer.record.key = key
            answer.record.value = stored.value
            answer.record.publisher = stored.publisher
            answer.record.ttl = self._store.remaining(stored)

    def _add_closest(self, asking: PeerId, key: bytes, answer: Any) -> None:
        target = int.from_bytes(hashlib.sha256(key).digest(), "big")

        def distance(known: KnownPeer) -> int:
            return int.from_bytes(hashlib.sha256(known.peer.raw).digest(), "big") ^ target

        others = [known for known in self._known() if known.peer != asking and known.addresses]
        for known in sorted(others, key=distance)[:CLOSEST]:
            if addresses := [address for address in known.addresses if self._passes(address)]:
                answer.closer_peers.add(id=known.peer.raw, addrs=addresses, connection=1)


class DirectoryClient:
    """Asks gateways."""

    def __init__(
        self, endpoint: Endpoint, gateways: Callable[[], Iterable[PeerId]], local: DirectoryServer | None = None
    ) -> None:
        self._endpoint = endpoint
        self._gateways = gateways
        self._local = local
        """A gateway's own part of the directory."""

    async def put(self, key: bytes, value: bytes, ttl: float) -> None:
        """Store a record at every gateway. Raises `UnreachableError` when none took it."""
        message = Message(type=Kind.PUT_VALUE, key=key)
        message.record.key, message.record.value = key, value
        message.record.publisher, message.record.ttl = self._endpoint.peer_id.raw, int(ttl)
        await self._ask_all(message, ASK_TIMEOUT)

    async def find(self, key: bytes, timeout: float) -> list[Record]:
        """Records of a key, highest `seq` first. Raises `UnreachableError` when no gateway answered."""
        answers = await self._ask_all(Message(type=Kind.GET_VALUE, key=key), timeout)
        found: dict[bytes, Record] = {}
        for answer in answers.values():
            record = answer.record
            if not answer.HasField("record") or record.key != key:
                continue
            old = found.get(record.publisher)
            if old is None or sequence(old.value) < sequence(record.value):
                found[record.publisher] = Record(key, bytes(record.value), _peer_id(record.publisher))
        return sorted(found.values(), key=lambda record: -sequence(record.value))

    async def find_addresses(self, peer: PeerId, timeout: float) -> list[bytes]:
        """Addresses of a peer, as multiaddr bytes, from what gateways know."""
        answers = await self._ask_all(Message(type=Kind.FIND_NODE, key=peer.raw), timeout)
        found: dict[bytes, None] = {}
        for answer in answers.values():
            for closer in answer.closer_peers:
                if closer.id == peer.raw:
                    found.update(dict.fromkeys(bytes(address) for address in closer.addrs[:32]))
        return list(found)

    async def neighbours(self, timeout: float) -> dict[PeerId, list[bytes]]:
        """Peers near this node that gateways know, with their addresses."""
        answers = await self._ask_all(Message(type=Kind.FIND_NODE, key=self._endpoint.peer_id.raw), timeout)
        found: dict[PeerId, list[bytes]] = {}
        for answer in answers.values():
            for closer in answer.closer_peers[: 4 * CLOSEST]:
                if (peer := _peer_id(closer.id)) is not None and peer != self._endpoint.peer_id:
                    found.setdefault(peer, [bytes(address) for address in closer.addrs[:32]])
        return found

    async def _ask_all(self, message: Any, timeout: float) -> Mapping[PeerId, Any]:
        answers: dict[PeerId, Any] = {}
        failures: list[str] = []
        if self._local is not None:
            answers[self._endpoint.peer_id] = self._local.answer(self._endpoint.peer_id, message)

        async def ask(gateway: PeerId) -> None:
            try:
                answers[gateway] = await self._ask(gateway, message, timeout)
            except NetError as error:
                failures.append(f"{gateway}: {error}")
                return
            tasks.cancel_scope.deadline = min(tasks.cancel_scope.deadline, anyio.current_time() + GRACE)

        gateways = list(self._gateways())
        async with anyio.create_task_group() as tasks:
            tasks.cancel_scope.deadline = anyio.current_time() + timeout
            for gateway in gateways:
                tasks.start_soon(ask, gateway)
        failures += [f"{gateway}: no answer within {timeout:g} s" for gateway in gateways if gateway not in answers]
        if not answers:
            raise UnreachableError("no gateway answered: " + ("; ".join(failures) or "none is connected"))
        return answers

    async def _ask(self, gateway: PeerId, message: Any, timeout: float) -> Any:
        stream = await self._endpoint.open_stream(gateway, [PROTOCOL], timeout=timeout)
        try:
            await write_message(stream, message)
            answer = await read_message(stream, Message)
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        if answer is None or answer.type != message.type:
            raise StreamResetError("the gateway's answer makes no sense")
        return answer


def _peer_id(raw: bytes) -> PeerId | None:
    try:
        return PeerId(bytes(raw))
    except InvalidIdError:
        return None
