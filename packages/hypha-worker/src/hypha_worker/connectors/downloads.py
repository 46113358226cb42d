"""Downloads from the Hugging Face Hub, from web servers and from this machine, bounded in size and time.

Called by `bridge.backend`; asks `access_policy` first. A download holds a thread only while it writes a block, so that
one whose server stalls ends as soon as it is cancelled. That is why `huggingface_hub` gives the addresses,
client and errors, but not `hf_hub_download`, which blocks. It and `httpx` are imported when the first job needs them,
which keeps the worker's start short.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

import anyio
import anyio.from_thread

from hypha_net.redaction import redact_urls
from hypha_proto.job_spec import HuggingFaceReference
from hypha_worker.connectors.access_policy import AccessPolicy, shown_url
from hypha_worker.errors import (
    BridgeError,
    StorageExceededError,
    bad_request,
    not_found,
    peer_failed,
    timed_out,
    to_bridge_error,
)
from hypha_worker.job_storage import JobStorage
from hypha_worker.paths import check_relative, safe_name

if TYPE_CHECKING:
    import httpx
    from huggingface_hub.utils import httpx as hub_httpx

_CHUNK: Final = 1 << 20
_REDIRECTS: Final = 5
_IDLE: Final = 60.0
RESUME_DELAYS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt at a download from the Hub that broke off."""
_TOKEN: Final = re.compile(r"[!-~]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A downloaded file."""

    path: PurePosixPath
    """Relative to the job's folder."""
    size: int
    checksum: str
    """``sha256:…``"""
    source: str


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


@contextmanager
def _staged(storage: JobStorage) -> Iterator[Path]:
    """Yield the path of an incomplete file; remove it on exit, if it is still there."""
    with storage.files.staged("downloads") as path:
        try:
            yield path
        except StorageExceededError as error:
            raise to_bridge_error(error) from error
        finally:
            storage.release(path)


async def _publish(staged: Path, target: PurePosixPath, source: str, storage: JobStorage) -> DownloadedFile:
    """Move a complete file into the job's folder; its digest is that of what was downloaded."""
    size, checksum = await storage.run(_digest, staged, abandon=True)
    storage.files.publish(staged, target)
    return DownloadedFile(target, size, checksum, source)


# ---------------------------------------------------------------------------------------------------------------- Hub


async def download_from_hub(
    reference: HuggingFaceReference,
    folder: PurePosixPath,
    access: AccessPolicy,
    *,
    storage: JobStorage,
    timeout: float = 1800.0,
) -> list[DownloadedFile]:
    """Download files of a repository to `folder` of the job, under their names in the repository.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or the Hub is unreachable.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repository = reference.repository
    access.check_repository(repository)
    names = [check_relative(name).as_posix() for name in reference.filenames]
    if not names:
        raise bad_request("filenames: [] names nothing to fetch: name at least one file of the repository")
    if not _TOKEN.fullmatch(reference.token or ""):  # the HTTP client's error would repeat it
        raise bad_request("token: it has characters that no token has, such as spaces: write it without them")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise bad_request(f"repository: {repository[:120]!r}: {str(error)[:400]}") from error
    try:
        with anyio.fail_after(timeout):
            return [await _download_from_hub(reference, name, folder, storage) for name in names]
    except TimeoutError:
        raise timed_out(f"repository {repository[:120]!r} was not downloaded within {timeout:g} s") from None


async def _download_from_hub(
    reference: HuggingFaceReference, name: str, folder: PurePosixPath, storage: JobStorage
) -> DownloadedFile:
    from huggingface_hub import get_async_session

    with _staged(storage) as part:
        download = _HubDownload(reference, name, part, storage)
        async with get_async_session() as client:
            await download.run(client)
        source = f"huggingface:{reference.repository}@{reference.revision or 'main'}/{name}"
        return await _publish(part, folder / name, source, storage)


@dataclass(slots=True)
class _HubDownload:
    """Download of one file of a repository, resumed where it breaks off."""

    reference: HuggingFaceReference
    name: str
    part: Path
    storage: JobStorage
    received: int = 0
    etag: str = ""
    """Identifies the content, of which the Hub states the SHA-256 for large files."""
    _began: bool = False
    """Whether the Hub has answered with the file, so that another attempt may succeed."""
    _sha256: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def _where(self) -> str:
        return f"{self.reference.repository[:120]}/{self.name[:120]}"

    async def run(self, client: hub_httpx.AsyncClient) -> None:
        """Download the file and check it.

        Raises:
            BridgeError: it is not there, or cannot be downloaded.
        """
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import httpx as hub_httpx

        delays = iter(RESUME_DELAYS)
        while True:
            try:
                await self._attempt(client)
                break
            except OfflineModeIsEnabled as error:
                raise peer_failed(f"{self._where}: {error}") from error
            except (hub_httpx.HTTPError, hub_httpx.InvalidURL) as error:
                delay = next(delays, None)
                if not self._began or delay is None:
                    slow = isinstance(error, hub_httpx.TimeoutException)
                    raise (timed_out if slow else peer_failed)(f"{self._where}: {error!r}") from error
                await anyio.sleep(delay)
        if _SHA256.fullmatch(self.etag) and self._sha256.hexdigest() != self.etag:
            raise peer_failed(f"{self._where}: the SHA-256 of the content is not {self.etag}, as the Hub stated")

    async def _attempt(self, client: hub_httpx.AsyncClient) -> None:
        from huggingface_hub import hf_hub_url

        reference, endpoint = self.reference, os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        url = hf_hub_url(reference.repository, self.name, revision=reference.revision or None, endpoint=endpoint)
        # The client follows redirects, and sends the token to the Hub's own origin only.
        async with client.stream("GET", url, headers=self._headers(), timeout=_IDLE) as response:
            self._check_status(response)
            etag = _etag(response)
            if response.status_code == 200 or etag != self.etag:
                self._restart(etag)
            if response.status_code == 206 and not self.received and _range_start(response):
                raise peer_failed(f"{self._where} changed while it was downloaded")
            self._began = True
            await self._store(response)

    def _restart(self, etag: str) -> None:
        self.received, self.etag, self._sha256 = 0, etag, hashlib.sha256()

    def _headers(self) -> dict[str, str]:
        """Return the headers; `build_hf_headers` may ask the Hub for a list first, and block for seconds."""
        headers = {"accept-encoding": "identity", "user-agent": _user_agent()}
        if self.reference.token:  # never this machine's own
            headers["authorization"] = f"Bearer {self.reference.token}"
        if self.received:
            headers["range"] = f"bytes={self.received}-"
        return headers

    def _check_status(self, response: hub_httpx.Response) -> None:
        """Raise a `BridgeError`, with the Hub's reason, unless the answer is the file or a part of it."""
        from huggingface_hub import hf_raise_for_status
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        revision = (self.reference.revision or "main")[:120]
        where = f"{self._where} at revision {revision}"
        try:
            hf_raise_for_status(response)
        except EntryNotFoundError as error:
            raise not_found(f"{self._where} does not exist at revision {revision}") from error
        except HfHubHTTPError as error:
            raise peer_failed(f"{where}: {_one_line(error, response)}") from error
        except (AttributeError, TypeError, ValueError):
            pass  # the body is not of the shape that it expects; the status is reported
        if response.status_code not in (200, 206):
            raise peer_failed(f"{where}: the Hub answered with status {response.status_code}")

    async def _store(self, response: hub_httpx.Response) -> None:
        size = self.received + int(response.headers.get("content-length", 0))
        with FileIO(self.part, "r+" if self.received else "w") as file:
            file.seek(self.received)
            async for block in response.aiter_bytes(_CHUNK):
                await self.storage.run(_append, self.storage, self.part, file, max(size, self.received), block)
                self._sha256.update(block)
                self.received += len(block)


def _user_agent() -> str:
    version = importlib.metadata.version
    return f"hypha-worker/{version('hypha-worker')}; hf_hub/{version('huggingface-hub')}"


def _one_line(error: Exception, response: hub_httpx.Response) -> str:
    """Return the message on one line, without the signature of a storage server's URL."""
    text = str(error).replace(str(response.url), str(response.url.copy_with(query=None)))
    return " ".join(text.split())[:400]


def _etag(response: hub_httpx.Response) -> str:
    """Return what identifies the content, as the Hub states it before it redirects to its storage."""
    answers = (*response.history, response)
    stated = (answer.headers.get(name) for name in ("x-linked-etag", "etag") for answer in answers)
    return next(filter(None, stated), "").removeprefix("W/").strip('"')


def _range_start(response: hub_httpx.Response) -> int:
    found = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return int(found[1]) if found else 0


def _append(storage: JobStorage, path: Path, file: FileIO, announced: int, block: bytes) -> None:
    """Write a block, if the job's storage allows the file as announced, and longer than that."""
    storage.reserve(path, max(announced, file.tell() + len(block)))
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


# --------------------------------------------------------------------------------------------------------------- URLs


async def download_from_uri(
    url: str,
    folder: PurePosixPath,
    access: AccessPolicy,
    *,
    storage: JobStorage,
    name: str | None = None,
    timeout: float = 1800.0,
) -> DownloadedFile:
    """Download the file at an ``https:``, ``http:`` or ``file:`` URL to `folder` of the job.

    Its name there is `name`, by default the last part of the URL's path.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or the server is unreachable.
    """
    scheme, path = _split(url)
    target = folder / (name or safe_name(path.rsplit("/", 1)[-1]))
    try:
        with _staged(storage) as part:
            if scheme == "file":
                await storage.run(_copy, access.resolve_file_url(url), part, access, storage)
            else:
                with anyio.fail_after(timeout):
                    await _download(url, part, access, storage)
            return await _publish(part, target, redact_urls(url), storage)
    except TimeoutError:
        raise timed_out(f"{shown_url(url)} was not downloaded within {timeout:g} s") from None


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise bad_request(f"value: {shown_url(url)!r} is no URL ({error}): write https://host/path") from None
    return parts.scheme, parts.path


def _copy(source: Path, target: Path, access: AccessPolicy, storage: JobStorage) -> None:
    """Copy a file in a worker thread; stop when the caller is cancelled."""
    with access.open_file(source) as reader, FileIO(target, "x") as writer:
        size = os.fstat(reader.fileno()).st_size
        storage.reserve(target, size)
        while block := reader.read(_CHUNK):
            anyio.from_thread.check_cancelled()
            _append(storage, target, writer, size, block)


async def _download(url: str, target: Path, access: AccessPolicy, storage: JobStorage) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=_IDLE, follow_redirects=False) as client:
        for _ in range(_REDIRECTS + 1):
            access.check_url(url)  # redirect targets are checked as well
            try:
                async with client.stream("GET", url) as response:
                    if not response.has_redirect_location:
                        await _store(response, target, storage)
                        return
                    url = urljoin(url, response.headers["location"])
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise _connection_error(shown_url(url), error) from error
    raise peer_failed(f"{shown_url(url)}: more than {_REDIRECTS} redirects")


def _connection_error(what: str, error: Exception) -> BridgeError:
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return timed_out(f"{what}: {error!r}")
    return peer_failed(f"{what}: {error!r}")


async def _store(response: httpx.Response, target: Path, storage: JobStorage) -> None:
    if response.status_code != 200:
        raise _status_error(str(response.url), response.status_code)
    announced = int(response.headers.get("content-length", 0))
    with FileIO(target, "x") as file:
        async for block in response.aiter_bytes(_CHUNK):
            await storage.run(_append, storage, target, file, announced, block)


def _status_error(url: str, status: int) -> BridgeError:
    if status in (404, 410):
        return not_found(f"{shown_url(url)} answered with status {status}")
    return peer_failed(f"{shown_url(url)} answered with status {status}")
