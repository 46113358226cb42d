"""What a gateway stores for the DHT: records by key, the newest of each, and the providers of keys.

Records with a lifetime of more than a minute are saved to disk and survive a restart; publishers renew the shorter ones
sooner than they would be missed.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import trio

from hypha_net.endpoint import Record
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError, InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import PREFIX, split_heartbeat

_log = logging.getLogger("hypha_net.kad")

MAX_RECORDS: Final = 32_768
MAX_RECORDS_OF_PEER: Final = 1024
MAX_STORED: Final = 64 << 20
"""Bytes of keys and values that a gateway keeps in all."""
MAX_STORED_OF_PEER: Final = 4 << 20
SAVE_EVERY: Final = 1.0
"""Seconds between two writes to disk if records changed; at least ten times the duration of a write."""
MAX_TTL: Final = 48 * 3600.0
MIN_SAVED_TTL: Final = 60.0
"""Lifetime in seconds up to which a record is not saved to disk."""
PROVIDER_TTL: Final = 24 * 3600.0
MAX_PROVIDERS: Final = 64
"""Providers of one key."""
SWEEP_EVERY: Final = 60.0
"""Shortest time in seconds between two sweeps for expired providers; a sweep runs only when a limit is reached."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record and its expiry, by the wall clock so that it can survive a restart."""

    value: bytes
    publisher: bytes
    expires: float
    is_saved: bool = True
    """Whether it is written to disk."""


class RecordStore:
    """The newest record of each key, bounded in number and size; saved in `folder` if there is one."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / "dht-records.json"
        self._clock = clock
        self._records: dict[bytes, StoredRecord] = {}
        self._of_peer: Counter[bytes] = Counter()
        self._size_of_peer: Counter[bytes] = Counter()
        self._size = 0
        self._has_changes = False
        self._changed = trio.Event()
        """Set while there are changes to write."""
        self._load()

    def get(self, key: bytes) -> StoredRecord | None:
        """Return the record of a key, unless it has expired."""
        record = self._records.get(key)
        if record is not None and record.expires <= self._clock():
            self._remove(key)
            return None
        return record

    def records(self) -> Iterator[Record]:
        """Yield the records that have not expired, of those that are stored when the iteration begins."""
        for key, stored in list(self._records.items()):
            if stored.expires > self._clock():
                yield Record(key, stored.value, _peer_id(stored.publisher))

    def put(self, key: bytes, value: bytes, publisher: bytes, ttl: float) -> bool:
        """Store a record; return False if the same publisher has a newer one, or a limit is reached."""
        old = self.get(key)
        if old is not None and old.publisher == publisher and _sequence_of(key, old.value) > _sequence_of(key, value):
            return False
        if not self._fits(key, value, publisher, old):
            self._expire()
            if not self._fits(key, value, publisher, self._records.get(key)):
                return False
        self._remove(key)
        self._insert(key, StoredRecord(value, publisher, self._clock() + min(ttl, MAX_TTL), ttl > MIN_SAVED_TTL))
        if ttl > MIN_SAVED_TTL or (old is not None and old.is_saved):
            self._has_changes = True
            self._changed.set()
        return True

    def remaining(self, record: StoredRecord) -> int:
        """Return the whole seconds until a record expires, at least one."""
        return max(1, int(record.expires - self._clock()))

    def _insert(self, key: bytes, record: StoredRecord) -> None:
        self._records[key] = record
        self._count(key, record, 1)

    def _remove(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._count(key, record, -1)

    def _count(self, key: bytes, record: StoredRecord, sign: int) -> None:
        size = sign * (len(key) + len(record.value))
        self._size += size
        self._size_of_peer[record.publisher] += size
        self._of_peer[record.publisher] += sign
        if not self._of_peer[record.publisher]:
            del self._of_peer[record.publisher], self._size_of_peer[record.publisher]

    def _fits(self, key: bytes, value: bytes, publisher: bytes, old: StoredRecord | None) -> bool:
        freed = 0 if old is None else len(key) + len(old.value)
        of_same = old is not None and old.publisher == publisher
        size, count = len(key) + len(value), len(self._records) - (old is not None)
        of_peer = self._size_of_peer[publisher] + size - (freed if of_same else 0)
        many = count >= MAX_RECORDS or self._of_peer[publisher] - of_same >= MAX_RECORDS_OF_PEER
        return not many and self._size - freed + size <= MAX_STORED and of_peer <= MAX_STORED_OF_PEER

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, record in self._records.items() if record.expires <= now]:
            self._remove(key)

    async def save_changes(self) -> None:
        """Write changes to disk until cancelled, and once more then; a change after a pause is written at once."""
        failed = False
        try:
            while True:
                await self._changed.wait()
                began = anyio.current_time()
                try:
                    await self._save_in_thread()
                    failed = False
                except OSError as error:
                    if not failed:
                        _log.error("%s cannot be written, so records will not survive a restart: %s", self._path, error)
                    failed = True
                await anyio.sleep(max(SAVE_EVERY, 10 * (anyio.current_time() - began)))
        finally:
            with anyio.CancelScope(shield=True), suppress(OSError):  # logged above, or only the last second is lost
                await self._save_in_thread()

    async def _save_in_thread(self) -> None:
        has_changes, self._has_changes, self._changed = self._has_changes, False, trio.Event()
        if has_changes and self._path is not None:
            try:
                await anyio.to_thread.run_sync(_write, self._path, self._saved_records())
            except OSError:
                self._has_changes = True
                self._changed.set()
                raise

    def save(self) -> None:
        """Write all records to disk in this thread. Raises `OSError`."""
        if self._path is not None:
            _write(self._path, self._saved_records())

    def _saved_records(self) -> list[tuple[bytes, StoredRecord]]:
        return [(key, record) for key, record in self._records.items() if record.is_saved]

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            for *parts, expires in parse_json(self._path.read_bytes()):
                key, value, publisher = (base64.b64decode(part, validate=True) for part in parts)
                self._remove(key)
                self._insert(key, StoredRecord(value, publisher, float(expires)))
        except (ValueError, TypeError, OverflowError) as error:
            for key in list(self._records):
                self._remove(key)
            _log.warning("%s cannot be read and is replaced: %s", self._path, error)


def _write(path: Path, records: list[tuple[bytes, StoredRecord]]) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("w") as file:  # record by record: one large dump would hold the GIL
        for number, (key, record) in enumerate(records):
            parts = [base64.b64encode(part).decode() for part in (key, record.value, record.publisher)]
            file.write(("," if number else "[") + json.dumps([*parts, record.expires]))
        file.write("]" if records else "[]")
    temporary.replace(path)


class ProviderStore:
    """Providers by key, bounded per key and per provider; each peer adds only itself."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._providers: dict[bytes, dict[PeerId, float]] = {}
        self._last_sweep = float("-inf")
        """When expired providers of all keys were last removed."""
        self._of_peer: Counter[PeerId] = Counter()

    def add(self, key: bytes, provider: PeerId) -> bool:
        """Add or renew a provider; return False if a limit is reached."""
        now = self._clock()
        if provider not in self._providers.get(key, ()):
            self._expire(key)
            if not self._fits(key, provider) and now >= self._last_sweep + SWEEP_EVERY:
                self._last_sweep = now
                for each in list(self._providers):
                    self._expire(each)
            if not self._fits(key, provider):
                return False
            self._of_peer[provider] += 1
        self._providers.setdefault(key, {})[provider] = now + PROVIDER_TTL
        return True

    def _fits(self, key: bytes, provider: PeerId) -> bool:
        return (
            len(self._providers.get(key, ())) < MAX_PROVIDERS and self._of_peer.get(provider, 0) < MAX_RECORDS_OF_PEER
        )

    def get(self, key: bytes) -> list[PeerId]:
        """Return the providers of a key."""
        self._expire(key)
        return list(self._providers.get(key, ()))

    def remove(self, key: bytes, provider: PeerId) -> None:
        """Remove a provider of a key, if it is one."""
        known = self._providers.get(key, {})
        if known.pop(provider, None) is not None:
            self._of_peer[provider] -= 1
            if not self._of_peer[provider]:
                del self._of_peer[provider]
        if not known:
            self._providers.pop(key, None)

    def _expire(self, key: bytes) -> None:
        now = self._clock()
        for provider in [peer for peer, expires in self._providers.get(key, {}).items() if expires <= now]:
            self.remove(key, provider)


def _peer_id(raw: bytes) -> PeerId | None:
    try:
        return PeerId(raw)
    except InvalidIdError:  # of a file that was written by hand
        return None


def sequence(value: bytes) -> int:
    """Return the `seq` of a record's JSON value; 0 when it has none."""
    try:
        number = parse_json(value).get("seq", 0)
    except (DecodeError, AttributeError):
        return 0
    return number if type(number) is int else 0


def _sequence_of(key: bytes, value: bytes) -> int:
    return sequence(split_heartbeat(value)[1] if key.startswith(PREFIX) else value)
