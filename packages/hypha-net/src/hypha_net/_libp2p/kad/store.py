"""What a gateway keeps of the directory: records, newest wins, and who says that it provides a key.

Before it: `kad_server`, which decides whose records are taken. Records that live longer than a minute survive a
restart; shorter ones are put again by their publishers before they could be missed.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import trio

from hypha_proto.ids import PeerId
from hypha_proto.signed_records import PREFIX, split_heartbeat

_log = logging.getLogger("hypha_net.dataset_directory")

MAX_RECORDS: Final = 32_768
MAX_RECORDS_OF_PEER: Final = 1024
MAX_STORED: Final = 64 << 20
"""Bytes of keys and values that a gateway keeps in all."""
MAX_STORED_OF_PEER: Final = 4 << 20
SAVE_EVERY: Final = 1.0
"""Seconds between two writes to the disk, if there is anything new; ten times as long as a write takes at least."""
MAX_TTL: Final = 48 * 3600.0
FLEETING: Final = 60.0
"""Seconds; a record that lives no longer is not written to the disk."""
PROVIDER_TTL: Final = 24 * 3600.0
MAX_PROVIDERS: Final = 64
"""Providers of one key."""
SWEEP_EVERY: Final = 60.0
"""Seconds between two looks through all keys for providers that have ended: only who finds no room causes them."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record and when it ends, on the wall clock so that it survives a restart."""

    value: bytes
    publisher: bytes
    expires: float
    lasting: bool = True
    """Whether it is written to the disk."""


class RecordStore:
    """Records by key, newest wins; kept in a file if there is a folder for it."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = None if folder is None else folder / "dht-records.json"
        self._clock = clock
        self._records: dict[bytes, StoredRecord] = {}
        self._of_peer: Counter[bytes] = Counter()
        self._size_of_peer: Counter[bytes] = Counter()
        self._size = 0
        self._unsaved = False
        self._news = trio.Event()
        """Set while there is something to write."""
        self._load()

    def get(self, key: bytes) -> StoredRecord | None:
        """The record of a key, unless it has expired."""
        record = self._records.get(key)
        if record is not None and record.expires <= self._clock():
            self._drop(key)
            return None
        return record

    def put(self, key: bytes, value: bytes, publisher: bytes, ttl: float) -> bool:
        """Store a record; false if a newer one of the same publisher is there, or there is no room."""
        old = self.get(key)
        if old is not None and old.publisher == publisher and _number(key, old.value) > _number(key, value):
            return False
        if not self._has_room(key, value, publisher, old):
            self._expire()
            if not self._has_room(key, value, publisher, self._records.get(key)):
                return False
        self._drop(key)
        self._keep(key, StoredRecord(value, publisher, self._clock() + min(ttl, MAX_TTL), ttl > FLEETING))
        if ttl > FLEETING or (old is not None and old.lasting):
            self._unsaved = True
            self._news.set()
        return True

    def remaining(self, record: StoredRecord) -> int:
        """Whole seconds that a record has left, at least one."""
        return max(1, int(record.expires - self._clock()))

    def _keep(self, key: bytes, record: StoredRecord) -> None:
        self._records[key] = record
        self._count(key, record, 1)

    def _drop(self, key: bytes) -> None:
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

    def _has_room(self, key: bytes, value: bytes, publisher: bytes, old: StoredRecord | None) -> bool:
        freed = 0 if old is None else len(key) + len(old.value)
        of_same = old is not None and old.publisher == publisher
        size, count = len(key) + len(value), len(self._records) - (old is not None)
        of_peer = self._size_of_peer[publisher] + size - (freed if of_same else 0)
        many = count >= MAX_RECORDS or self._of_peer[publisher] - of_same >= MAX_RECORDS_OF_PEER
        return not many and self._size - freed + size <= MAX_STORED and of_peer <= MAX_STORED_OF_PEER

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, record in self._records.items() if record.expires <= now]:
            self._drop(key)

    async def keep_saved(self) -> None:
        """Write what is new to the disk, at once after a while without, until cancelled, and then once more."""
        failed = False
        try:
            while True:
                await self._news.wait()
                began = anyio.current_time()
                try:
                    await self._save_behind()
                    failed = False
                except OSError as error:
                    if not failed:
                        _log.error("%s cannot be written, so records are lost at the end: %s", self._path, error)
                    failed = True
                await anyio.sleep(max(SAVE_EVERY, 10 * (anyio.current_time() - began)))
        finally:
            with anyio.CancelScope(shield=True), suppress(OSError):  # that was told above, or is the last second's
                await self._save_behind()

    async def _save_behind(self) -> None:
        unsaved, self._unsaved, self._news = self._unsaved, False, trio.Event()
        if unsaved and self._path is not None:
            try:
                await anyio.to_thread.run_sync(_write, self._path, self._lasting())
            except OSError:
                self._unsaved = True
                self._news.set()
                raise

    def save(self) -> None:
        """Write everything to the disk, and wait for it. Raises `OSError`."""
        if self._path is not None:
            _write(self._path, self._lasting())

    def _lasting(self) -> list[tuple[bytes, StoredRecord]]:
        return [(key, record) for key, record in self._records.items() if record.lasting]

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            for *parts, expires in json.loads(self._path.read_text()):
                key, value, publisher = (base64.b64decode(part, validate=True) for part in parts)
                self._drop(key)
                self._keep(key, StoredRecord(value, publisher, float(expires)))
        except (ValueError, TypeError) as error:
            for key in list(self._records):
                self._drop(key)
            _log.warning("%s is not readable and is begun anew: %s", self._path, error)


def _write(path: Path, records: list[tuple[bytes, StoredRecord]]) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("w") as file:  # record by record: one large dump would hold up every other thread
        for number, (key, record) in enumerate(records):
            parts = [base64.b64encode(part).decode() for part in (key, record.value, record.publisher)]
            file.write(("," if number else "[") + json.dumps([*parts, record.expires]))
        file.write("]" if records else "[]")
    temporary.replace(path)


class ProviderStore:
    """Who says that it provides a key; each says so for itself alone."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._providers: dict[bytes, dict[PeerId, float]] = {}
        self._swept = float("-inf")
        """When those that had ended were last dropped, of all keys."""
        self._of_peer: Counter[PeerId] = Counter()

    def add(self, key: bytes, provider: PeerId) -> bool:
        """Note a provider; false if there is no room."""
        now = self._clock()
        if provider not in self._providers.get(key, ()):
            self._expire(key)
            if not self._has_room(key, provider) and now >= self._swept + SWEEP_EVERY:
                self._swept = now
                for each in list(self._providers):
                    self._expire(each)
            if not self._has_room(key, provider):
                return False
            self._of_peer[provider] += 1
        self._providers.setdefault(key, {})[provider] = now + PROVIDER_TTL
        return True

    def _has_room(self, key: bytes, provider: PeerId) -> bool:
        return (
            len(self._providers.get(key, ())) < MAX_PROVIDERS and self._of_peer.get(provider, 0) < MAX_RECORDS_OF_PEER
        )

    def get(self, key: bytes) -> list[PeerId]:
        """The providers of a key."""
        self._expire(key)
        return list(self._providers.get(key, ()))

    def remove(self, key: bytes, provider: PeerId) -> None:
        """Forget a provider of a key. No error if it is none."""
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


def sequence(value: bytes) -> int:
    """The `seq` of a record's JSON value; 0 when it has none."""
    try:
        number = json.loads(value).get("seq", 0)
    except (ValueError, AttributeError, RecursionError):
        return 0
    return number if type(number) is int else 0


def _number(key: bytes, value: bytes) -> int:
    return sequence(split_heartbeat(value)[1] if key.startswith(PREFIX) else value)
