"""Files of repositories on a Hugging Face Hub.

`huggingface_hub` gives the addresses, client and errors, but not `hf_hub_download`, which blocks: a download holds a
thread only while it writes a block, so that one whose server stalls ends as soon as it is cancelled. It is imported
when the first job needs it, which keeps the worker's start short. With ``HF_HUB_OFFLINE`` files come from the cache of
the hub on this machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from hypha_net.connectors.content import IDLE_TIMEOUT, ContentStream, SourceInterruptedError
from hypha_net.connectors.errors import FetchError, not_found, source_failed, timed_out
from hypha_net.connectors.http_source import read_large_blocks
from hypha_proto.job_spec import HuggingFaceReference
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.errors import bad_request

if TYPE_CHECKING:
    from huggingface_hub.utils import httpx as hub_httpx

_CHUNK: Final = 1 << 20
_TOKEN: Final = re.compile(r"[!-~]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def check_reference(reference: HuggingFaceReference, access: AccessPolicy) -> None:
    """Refuse a repository that is not allowed, or whose name or token cannot be one.

    Raises:
        BridgeError: it is refused.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    access.check_repository(reference.repository)
    if not reference.filenames:
        raise bad_request("filenames: [] names nothing to fetch: name at least one file of the repository")
    if not _TOKEN.fullmatch(reference.token or ""):  # the HTTP client's error would repeat it
        raise bad_request("token: it has characters that no token has, such as spaces: write it without them")
    try:
        validate_repo_id(reference.repository)
    except HFValidationError as error:
        raise bad_request(f"repository: {reference.repository!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a repository."""

    reference: HuggingFaceReference
    filename: str

    @property
    def name(self) -> str:
        """See `ContentSource.name`."""
        return f"{self.reference.repository}/{self.filename}"

    @property
    def cache_key(self) -> tuple[str, str]:
        """See `ContentSource.cache_key`."""
        return "huggingface", f"{os.environ.get('HF_ENDPOINT', '')}\n{self.origin}"

    @property
    def origin(self) -> str:
        """What executors read as the source of the file."""
        return f"huggingface:{self.reference.repository}@{self.reference.revision or 'main'}/{self.filename}"

    @asynccontextmanager
    async def open(self, offset: int, version: str) -> AsyncGenerator[ContentStream | None]:
        """See `ContentSource.open`."""
        from huggingface_hub import constants, hf_hub_url

        if constants.HF_HUB_OFFLINE:
            yield self._open_cached(offset)
            return
        reference, endpoint = self.reference, os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        url = hf_hub_url(reference.repository, self.filename, revision=reference.revision or None, endpoint=endpoint)
        with self._hub_errors():
            # The client follows redirects, and sends the token to the Hub's own origin only.
            async with _client() as client:
                if version and not offset and await self._is_unchanged(client, url, version):
                    yield None
                    return
                async with client.stream("GET", url, headers=self._headers(offset), timeout=IDLE_TIMEOUT) as response:
                    self._check_status(response)
                    yield self._content(response)

    def _open_cached(self, offset: int) -> ContentStream:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.reference.repository, self.filename, revision=self.reference.revision)
        if not isinstance(found, str):
            revision = self.reference.revision or "main"
            raise not_found(
                f"{self.name} is not in the hub's cache at revision {revision}, and HF_HUB_OFFLINE is set for this "
                "worker: let the scheduler serve the files (serve = true)"
            )
        path = Path(found).resolve()  # its name is the ETag
        return ContentStream(_read_blocks(path, offset), offset, path.stat().st_size, path.name)

    async def _is_unchanged(self, client: hub_httpx.AsyncClient, url: str, version: str) -> bool:
        """Ask the Hub, but not its storage, whether a file is still the one that the cache has."""
        response = await client.head(url, headers=self._headers(0), timeout=IDLE_TIMEOUT, follow_redirects=False)
        return response.status_code in (200, 301, 302, 303, 307, 308) and _etag(response) == version

    def _headers(self, offset: int) -> dict[str, str]:
        """Return the headers; `build_hf_headers` may ask the Hub for a list first, and block for seconds."""
        headers = {"accept-encoding": "identity", "user-agent": _user_agent()}
        if self.reference.token:  # never this machine's own
            headers["authorization"] = f"Bearer {self.reference.token}"
        if offset:
            headers["range"] = f"bytes={offset}-"
        return headers

    def _content(self, response: hub_httpx.Response) -> ContentStream:
        etag = _etag(response)
        start = _range_start(response) if response.status_code == 206 else 0
        length = response.headers.get("content-length")
        size = None if length is None or not length.isascii() or not length.isdigit() else start + int(length)
        # the Hub states the SHA-256 of large files
        digest = f"sha256:{etag}" if _SHA256.fullmatch(etag) else None
        return ContentStream(self._blocks(response), start, size, etag, digest)

    async def _blocks(self, response: hub_httpx.Response) -> AsyncGenerator[bytes]:
        with self._hub_errors():
            async for block in response.aiter_bytes():
                yield block

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        from huggingface_hub.utils import httpx as hub_httpx

        try:
            yield
        except (hub_httpx.HTTPError, hub_httpx.InvalidURL) as error:
            make: Callable[[str], FetchError] = (
                timed_out if isinstance(error, hub_httpx.TimeoutException) else source_failed
            )
            raise SourceInterruptedError(make(f"{self.name}: {error!r}")) from error

    def _check_status(self, response: hub_httpx.Response) -> None:
        """Raise a `FetchError`, with the Hub's reason, unless the answer is the file or a part of it."""
        from huggingface_hub import hf_raise_for_status
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        revision = self.reference.revision or "main"
        where = f"{self.name} at revision {revision}"
        try:
            hf_raise_for_status(response)
        except EntryNotFoundError as error:
            raise not_found(f"{self.name} does not exist at revision {revision}") from error
        except HfHubHTTPError as error:
            raise source_failed(f"{where}: {_message(error, response)}") from error
        except (AttributeError, TypeError, ValueError):
            pass  # the body is not of the shape that it expects; the status is reported
        if response.status_code not in (200, 206):
            raise source_failed(f"{where}: the Hub answered with status {response.status_code}")


def _client() -> hub_httpx.AsyncClient:
    """Return a client like the Hub's, which refuses to work in offline mode, but without proxies of the environment."""
    from huggingface_hub.utils import httpx as hub_httpx

    read_large_blocks()
    hooks, context = _client_parts()
    return hub_httpx.AsyncClient(event_hooks=hooks, verify=context, follow_redirects=True, trust_env=False)


@functools.cache
def _client_parts() -> tuple[Any, ssl.SSLContext]:
    """Return the hooks of the Hub's own client, and what verifies servers: made once, since it reads all certificates.

    The context is made with the environment, which may name the certificates of a hub of one's own.
    """
    from huggingface_hub.utils import get_async_session
    from huggingface_hub.utils import httpx as hub_httpx

    return get_async_session().event_hooks, hub_httpx.create_ssl_context()


def _user_agent() -> str:
    version = importlib.metadata.version
    return f"hypha-worker/{version('hypha-worker')}; hf_hub/{version('huggingface-hub')}"


def _message(error: Exception, response: hub_httpx.Response) -> str:
    """Return the message on one line, without the signature of a storage server's URL."""
    text = str(error).replace(str(response.url), str(response.url.copy_with(query=None)))
    return " ".join(text.split())


def _etag(response: hub_httpx.Response) -> str:
    """Return what identifies the content, as the Hub states it before it redirects to its storage."""
    answers = (*response.history, response)
    stated = (answer.headers.get(name) for name in ("x-linked-etag", "etag") for answer in answers)
    return next(filter(None, stated), "").removeprefix("W/").strip('"')


def _range_start(response: hub_httpx.Response) -> int:
    found = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return int(found[1]) if found else 0


async def _read_blocks(path: Path, offset: int) -> AsyncGenerator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(offset)
        while block := await file.read(_CHUNK):
            yield block
