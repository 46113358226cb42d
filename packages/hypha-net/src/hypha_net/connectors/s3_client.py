"""The S3 service of a node: its settings, and threads of its own for obstore's calls.

obstore's coroutines need asyncio, but daemons run on trio. obstore also reads ``AWS_*`` variables and proxies of the
environment; every setting of theirs is given here, so that the machine's own credentials are never used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")

READ_TIMEOUT: Final = 60.0
"""Seconds after which a service that sends nothing has failed."""
REQUEST_TIMEOUT: Final = 3600.0
"""Maximum seconds of one request; the rest of a longer download is requested again."""
MAX_THREADS: Final = 8
"""Maximum number of concurrent requests."""
_UNUSED_PROXY: Final = "http://127.0.0.1:9"
"""A proxy from which every host is excluded; it replaces those of the environment."""


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The S3 service of a node; the credentials never appear in a representation or an error."""

    endpoint: str | None = None
    """URL; by default that of AWS in `region`."""
    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """URL of the service."""
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"


class S3Client:
    """Opens buckets, and runs requests in threads that no other work waits for."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings: Final = settings
        self._stores: dict[str, S3Store] = {}
        self._lock = threading.Lock()
        self._threads: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Call a blocking function; when the caller is cancelled, its thread ends with the request's timeout."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(MAX_THREADS)
        return await anyio.to_thread.run_sync(function, limiter=self._threads, abandon_on_cancel=True)

    def open_bucket(self, bucket: str) -> S3Store:
        """Return what reads a bucket; blocks for the import."""
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = _make_store(self.settings, bucket)
            return self._stores[bucket]

    def presign(self, bucket: str, key: str, life: timedelta) -> str:
        """Return a URL at which anybody may read an object; it is as secret as the keys that sign it. Blocks."""
        import obstore

        return obstore.sign(self.open_bucket(bucket), "GET", key, life)


def _make_store(settings: S3Settings, bucket: str) -> S3Store:
    from obstore.store import S3Store

    access_key, secret_key = settings.access_key, settings.secret_key
    pair = {"access_key_id": access_key, "secret_access_key": secret_key, "token": None, "expires_at": None}
    is_signed = access_key is not None and secret_key is not None
    credentials: dict[str, Any] = {"credential_provider": lambda: pair} if is_signed else {"skip_signature": True}
    host = urlsplit(settings.url).hostname or ""
    store: S3Store = S3Store(
        bucket,
        endpoint=settings.url,
        region=settings.region or "us-east-1",
        virtual_hosted_style_request=False,
        request_payer=False,
        client_options={
            "allow_http": True,
            "connect_timeout": "10s",
            "read_timeout": f"{READ_TIMEOUT:g}s",
            "timeout": f"{REQUEST_TIMEOUT:g}s",
            "proxy_url": _UNUSED_PROXY,
            "proxy_excludes": host,
        },
        retry_config={"max_retries": 0},
        access_key_id="unused",  # in place of those of the environment, which must come in pairs
        secret_access_key="unused",
        **credentials,
    )
    return store
