"""Objects of S3 buckets, streamed by obstore, whose blocking calls `s3_client` runs in threads.

A service states no SHA-256 of an object, so that content has a BLAKE3 digest, as that of peers: SHA-256 takes longer
than all that obstore does for the same bytes.
obstore is imported when the first download needs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import quote

import anyio
from blake3 import blake3

from hypha_net.connectors.content import BLOCK, IDLE_TIMEOUT, ContentStream, SourceInterruptedError
from hypha_net.connectors.errors import bad_request, not_allowed, not_found, source_failed, timed_out
from hypha_net.connectors.s3_client import S3Client

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult

T = TypeVar("T")

_CODE: Final = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,300})</Message>")
_MAX_KEY: Final = 1024
BATCH: Final = 2
"""Blocks that one call in a thread reads. With more of them at once, memory is given back to the kernel and taken again
all the time, which costs more than changing threads."""
BATCH_SECONDS: Final = 0.1


class _UnchangedError(Exception):
    """The object still has the version that was asked for."""


class S3Access(Protocol):
    """Decides which buckets may be read, and reads them."""

    @property
    def s3(self) -> S3Client:
        """Reads buckets with the owner's endpoint and credentials."""
        ...

    def check_bucket(self, bucket: str) -> None:
        """Refuse a bucket that may not be read: raise an error, which is passed on."""
        ...


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object."""

    bucket: str
    object_key: str
    access: S3Access

    @property
    def name(self) -> str:
        """See `ContentSource.name`."""
        return s3_uri(self.bucket, self.object_key)

    @property
    def cache_key(self) -> tuple[str, str]:
        """See `ContentSource.cache_key`."""
        return "s3", f"{self._client.settings.url}\n{self.bucket}\n{self.object_key}"

    @property
    def _client(self) -> S3Client:
        return self.access.s3

    @asynccontextmanager
    async def open(self, offset: int, version: str) -> AsyncGenerator[ContentStream | None]:
        """See `ContentSource.open`."""
        self.access.check_bucket(self.bucket)
        if not 0 < len(self.object_key.encode()) <= _MAX_KEY:
            raise bad_request(f"key: {self.object_key!r} has not 1 to {_MAX_KEY} bytes: write the object's key")
        try:
            found = await self._run(lambda: self._get(offset, version))
        except _UnchangedError:
            yield None
            return
        etag = found.meta["e_tag"] or ""
        stream = iter(found.stream(min_chunk_size=BLOCK))
        yield ContentStream(self._blocks(stream), found.range[0], found.meta["size"], etag, hasher=blake3)

    def _get(self, offset: int, version: str) -> GetResult:
        import obstore

        options: GetOptions = {}
        if offset and version:
            options = {"range": {"offset": offset}, "if_match": version}
        elif version:
            options = {"if_none_match": version}
        with self._s3_errors():
            return obstore.get(self._client.open_bucket(self.bucket), self.object_key, options=options)

    async def _blocks(self, stream: Iterator[bytes]) -> AsyncGenerator[bytes]:
        while batch := await self._run(lambda: self._read(stream)):
            for block in batch:
                yield block

    def _read(self, stream: Iterator[bytes]) -> list[bytes]:
        """Return up to `BATCH` blocks, fewer if they come slowly; none at the end."""
        blocks: list[bytes] = []
        slow = time.monotonic() + BATCH_SECONDS
        with self._s3_errors():
            for block in stream:
                blocks.append(block)
                if len(blocks) == BATCH or time.monotonic() > slow:
                    break
        return blocks

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            with anyio.fail_after(IDLE_TIMEOUT + 15):  # for a place among the threads, too
                return await self._client.run(function)
        except TimeoutError:
            raise SourceInterruptedError(
                timed_out(f"{self.name}: no answer from {self._client.settings.url}")
            ) from None

    @contextmanager
    def _s3_errors(self) -> Iterator[None]:
        """Translate the errors of obstore, whose texts have the service's answer and no credentials."""
        from obstore import exceptions

        try:
            yield
        except exceptions.NotModifiedError:
            raise _UnchangedError from None
        except FileNotFoundError as error:
            code = _reason(error)
            remedy = "check the bucket's name" if "NoSuchBucket" in code else "check bucket and key"
            raise not_found(f"{self.name}: {code}: {remedy}") from None
        except exceptions.PreconditionError:
            changed = source_failed(f"{self.name}: it changed while it was downloaded")
            raise SourceInterruptedError(changed, restart=True) from None
        except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise not_allowed(
                f"{self.name}: {_reason(error)}: this node's owner may set connectors.s3_access_key and "
                "s3_secret_key of somebody who may read it"
            ) from None
        except (ValueError, exceptions.InvalidPathError):
            raise bad_request(
                f"key: {self.object_key!r} has empty parts, '.' or '..', which are not supported"
            ) from None
        except exceptions.BaseError as error:
            raise self._other_error(error) from None

    def _other_error(self, error: Exception) -> Exception:
        reason, where = _reason(error), self._client.settings.url
        if found := re.search(r"\b([345]\d\d)\b [A-Z]", str(error)):
            told = source_failed(f"{self.name}: {where} answered {reason}: check connectors.s3_endpoint and s3_region")
            return SourceInterruptedError(told) if found[1].startswith("5") else told
        return SourceInterruptedError(
            source_failed(f"{self.name}: {where} cannot be used ({reason}): check connectors.s3_endpoint")
        )


def s3_uri(bucket: str, key: str) -> str:
    """Return the URI of an object: ``s3://bucket/key``."""
    return f"s3://{bucket}/{quote(key)}"


def _reason(error: Exception) -> str:
    """Return what the service says, on one line."""
    text = str(error)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        return f"{code[1]}{f', {message[1]}' if message is not None else ''}"
    return " ".join(text.partition("\n")[0].rpartition(" - ")[2].split()).rstrip(": ")
