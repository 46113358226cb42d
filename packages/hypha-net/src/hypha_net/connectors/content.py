"""Content of one file from any source: streamed to disk, resumed after interruptions, hashed, and limited in bytes.

Each kind of source (`http_source`, `s3_source`) opens its content at a byte; `fetch_content` does the rest for all of
them. Files of peers come by `hypha_net.transfer`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hypha_net import retries
from hypha_net.connectors.errors import FetchError, source_failed
from hypha_net.errors import first_leaf_error

_log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK: Final = 1 << 20
"""Bytes to which smaller blocks are joined before they are written."""
IDLE_TIMEOUT: Final = 60.0
"""Seconds after which a source that sends nothing has failed."""


class SourceInterruptedError(Exception):
    """Content was interrupted, and another attempt may bring the rest.

    Attributes:
        reason: what is reported if no further attempt is made.
        restart: whether the next attempt is to begin at the first byte.
    """

    def __init__(self, reason: FetchError, *, restart: bool = False) -> None:
        super().__init__(reason.detail)
        self.reason = reason
        self.restart = restart


@dataclass(frozen=True, slots=True)
class ContentStream:
    """Content that a source has opened."""

    blocks: AsyncGenerator[bytes]
    """The bytes from `offset` on; raises `SourceInterruptedError` or `FetchError`."""
    offset: int
    """Position of the first byte; 0 if the source cannot begin later."""
    size: int | None
    """Bytes of the whole content, if known."""
    version: str
    """Identifies the content, so that parts of two versions are never joined; empty if the source states nothing."""
    digest: str | None = None
    """``sha256:…`` of the whole content, if the source states it."""
    hasher: Callable[[], Any] = hashlib.sha256
    """Makes what hashes the whole content, with the interface of `hashlib`."""


class ContentSource(Protocol):
    """Where one file is."""

    @property
    def name(self) -> str:
        """How errors name it: without secrets."""
        ...

    @property
    def cache_key(self) -> tuple[str, str]:
        """Kind of source, and what identifies it among those of its kind; may be secret."""
        ...

    def open(self, offset: int, version: str) -> AbstractAsyncContextManager[ContentStream | None]:
        """Open the content at a byte, or at the first one if it cannot be opened there; None if the cache has it.

        Args:
            offset: number of bytes that were received already.
            version: their version; with an offset of 0, a version that the cache has completely.

        Raises:
            SourceInterruptedError: it failed in a way that another attempt may not.
            FetchError: there is none, or it is not allowed.
        """
        ...


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """Version of a source's content when it was fetched."""

    digest: str
    version: str


class ContentStorage:
    """Where content is stored: counts its bytes, has threads for writing, and may have a cache; here none."""

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a blocking function in a thread."""
        return await anyio.to_thread.run_sync(function, *arguments)

    def reserve(self, path: Path, size: int) -> None:
        """Reserve the bytes of a file, in a thread; raise an error, which is passed on, if they are too many."""

    def release(self, path: Path) -> None:
        """End the reservation of a file, which is complete or given up."""

    def find_cached_version(self, kind: str, source: str) -> CachedVersion | None:
        """Return the version of a source that is in the cache, or None."""
        return None

    async def take_cached_version(self, kind: str, source: str, target: Path) -> int | None:
        """Copy a source's cached content to a new file; return its size, or None if it is not in the cache."""
        return None

    async def put_cached_version(self, kind: str, source: str, path: Path, found: CachedVersion) -> None:
        """Add a complete file to the cache as a source's present version."""


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """Content that is on disk."""

    size: int
    digest: str
    """``sha256:…`` or ``blake3:…``"""


async def fetch_content(source: ContentSource, path: Path, storage: ContentStorage) -> FetchedContent:
    """Write all content of a source to the staged file at `path`, which is incomplete until this returns.

    Raises:
        FetchError: it is not there, is not what the source stated, or broke off too often.
        OSError: it cannot be written.
    """
    known = storage.find_cached_version(*source.cache_key)
    try:
        return await _Fetch(source, path, storage, known).run()
    finally:
        storage.release(path)


@dataclass(slots=True)
class _Fetch:
    source: ContentSource
    path: Path
    storage: ContentStorage
    known: CachedVersion | None = None
    """Version of the source that the cache has."""
    _received: int = 0
    _version: str = ""
    _most: int = 0
    """Largest number of bytes that any attempt has reached."""
    _began: bool = False
    """Whether the source has opened the content once, so that another attempt may succeed."""
    _hasher: Any = None

    async def run(self) -> FetchedContent:
        failures = 0
        while True:
            before = self._most
            try:
                return await self._attempt()
            except SourceInterruptedError as error:
                if self._most >= before + BLOCK:
                    failures = 0
                if not self._began or failures == retries.TRANSFER.times:
                    raise error.reason from error
                if error.restart:
                    self._received = 0
                _log.info("%s at byte %d: %s; trying again", self.source.name, self._received, error)
            await retries.TRANSFER.wait(failures)
            failures += 1

    async def _attempt(self) -> FetchedContent:
        in_cache = "" if self.known is None else self.known.version
        asked = self._version if self._received else in_cache
        async with self.source.open(self._received, asked) as content:
            if content is None:
                return await self._take_cached()
            self._check_start(content)
            self._began = True
            with FileIO(self.path, "r+" if self._received else "w") as file:
                file.seek(self._received)
                await self._store(content, file)
        fetched = self._finish(content)
        if content.version:
            found = CachedVersion(fetched.digest, content.version)
            await self.storage.put_cached_version(*self.source.cache_key, self.path, found)
        return fetched

    async def _take_cached(self) -> FetchedContent:
        known, self.known = self.known, None
        if known is None:
            raise source_failed(f"{self.source.name}: the source says that nothing has changed, which was not asked")
        self._began = True
        size = await self.storage.take_cached_version(*self.source.cache_key, self.path)
        if size is None:
            gone = source_failed(f"{self.source.name}: the cache has lost it")
            raise SourceInterruptedError(gone, restart=True)
        return FetchedContent(size, known.digest)

    def _check_start(self, content: ContentStream) -> None:
        if content.offset == 0:
            self._received, self._version, self._hasher = 0, content.version, content.hasher()
        elif content.offset != self._received or content.version != self._version:
            changed = source_failed(f"{self.source.name}: it changed while it was downloaded")
            raise SourceInterruptedError(changed, restart=True)

    async def _store(self, content: ContentStream, file: FileIO) -> None:
        """Write all blocks to a file; those that are here are hashed and written while the next ones come."""
        send, receive = anyio.create_memory_object_stream[bytes | bytearray](1)
        interruption: SourceInterruptedError | None = None
        try:
            with receive:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write_all, file, content.size, receive)
                    with send:
                        interruption = await self._read_all(content, send)
        except ExceptionGroup as errors:
            raise first_leaf_error(errors) from None
        if interruption is not None:
            raise interruption

    @staticmethod
    async def _read_all(
        content: ContentStream, send: MemoryObjectSendStream[bytes | bytearray]
    ) -> SourceInterruptedError | None:
        """Pass all blocks on, small ones joined to `BLOCK` bytes; return the reason of an interruption, if any."""
        pending = bytearray()
        async with aclosing(content.blocks) as blocks:
            try:
                async for block in blocks:
                    if not pending and len(block) >= BLOCK:
                        await send.send(block)
                        continue
                    pending += block
                    if len(pending) >= BLOCK:
                        await send.send(pending)
                        pending = bytearray()
            except SourceInterruptedError as error:
                await send.send(pending)
                return error
        await send.send(pending)
        return None

    async def _write_all(
        self, file: FileIO, size: int | None, receive: MemoryObjectReceiveStream[bytes | bytearray]
    ) -> None:
        async for block in receive:
            waiting = receive.statistics().current_buffer_used
            await self._write(file, size, [block, *(receive.receive_nowait() for _ in range(waiting))])

    async def _write(self, file: FileIO, size: int | None, blocks: Sequence[bytes | bytearray]) -> None:
        end = self._received + sum(map(len, blocks))
        if size is not None and end > size:
            raise source_failed(f"{self.source.name}: more came than the {size} bytes that were announced")
        await self.storage.run(self._append, file, max(size or 0, end), blocks)
        self._received = end
        self._most = max(self._most, end)

    def _append(self, file: FileIO, size: int, blocks: Sequence[bytes | bytearray]) -> None:
        self.storage.reserve(self.path, size)
        for block in blocks:
            rest = memoryview(block)
            self._hasher.update(rest)
            while rest:
                rest = rest[file.write(rest) :]

    def _finish(self, content: ContentStream) -> FetchedContent:
        if content.size is not None and self._received != content.size:
            cut = source_failed(f"{self.source.name}: {self._received} bytes came of {content.size}")
            raise SourceInterruptedError(cut)
        digest = f"{self._hasher.name}:{self._hasher.hexdigest()}"
        if content.digest is not None and digest != content.digest:
            raise source_failed(
                f"{self.source.name}: the digest of the content is {digest}, not {content.digest} as stated"
            )
        return FetchedContent(self._received, digest)
