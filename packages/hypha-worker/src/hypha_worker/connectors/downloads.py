"""Downloads from the Hugging Face Hub, from web servers and from this machine, bounded in size and time.

Called by `bridge.backend`; asks `access_policy` first. `httpx` and `huggingface_hub` are imported when the first job
needs them, which keeps the worker's start short.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

import anyio
import anyio.to_thread

from hypha_proto.job_spec import HuggingFaceReference
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.errors import BridgeError, bad_request, not_found, peer_failed, timed_out
from hypha_worker.paths import check_relative, safe_name

if TYPE_CHECKING:
    import httpx

_CHUNK: Final = 1 << 20
_REDIRECTS: Final = 5
_IDLE: Final = 60.0


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A downloaded file."""

    path: Path
    size: int
    checksum: str
    """``sha256:…``"""
    source: str


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


async def _describe(path: Path, source: str) -> DownloadedFile:
    size, checksum = await anyio.to_thread.run_sync(_digest, path)
    return DownloadedFile(path, size, checksum, source)


async def download_from_hub(
    reference: HuggingFaceReference, folder: Path, access: AccessPolicy, *, max_bytes: int, timeout: float = 1800.0
) -> list[DownloadedFile]:
    """Download files of a repository to `folder`, under their names in the repository.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or the Hub is unreachable.
    """
    access.check_repository(reference.repository)
    names = [check_relative(name).as_posix() for name in reference.filenames]
    if not names:
        raise bad_request(f"repository {reference.repository[:120]!r}: filenames is empty")
    downloaded = []
    try:
        with anyio.fail_after(timeout):
            for name in names:
                path = await anyio.to_thread.run_sync(
                    _download_from_hub, reference, name, folder, max_bytes, abandon_on_cancel=True
                )
                source = f"huggingface:{reference.repository}@{reference.revision or 'main'}/{name}"
                downloaded.append(await _describe(path, source))
    except TimeoutError:
        raise timed_out(f"repository {reference.repository[:120]!r} was not downloaded within {timeout:g} s") from None
    return downloaded


def _download_from_hub(reference: HuggingFaceReference, name: str, folder: Path, max_bytes: int) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    where = f"{reference.repository[:120]}/{name[:120]}"
    token: str | bool = reference.token or False
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        url = hf_hub_url(reference.repository, name, revision=reference.revision, endpoint=endpoint)
        size = get_hf_file_metadata(url, token=token, timeout=_IDLE).size
        if size is not None and size > max_bytes:
            raise bad_request(f"{where} has {size} bytes, more than this job's limit of {max_bytes}")
        path = hf_hub_download(
            reference.repository,
            name,
            revision=reference.revision,
            token=token,
            endpoint=endpoint,
            local_dir=folder,
            etag_timeout=_IDLE,
        )
    except LocalEntryNotFoundError as error:
        raise peer_failed(f"{where}: the Hub cannot be reached: {str(error)[:300]}") from error
    except EntryNotFoundError as error:
        raise not_found(f"{where} does not exist at revision {reference.revision or 'main'}") from error
    except HfHubHTTPError as error:
        raise peer_failed(f"{where}: {str(error)[:400]}") from error
    except ValueError as error:  # not a valid repository name
        raise bad_request(f"{where}: {str(error)[:400]}") from error
    except BridgeError:
        raise
    except Exception as error:  # connection errors of an HTTP library that depends on the client's version
        raise peer_failed(f"{where}: {error!r:.400}") from error
    return Path(path).resolve()


async def download_from_uri(
    url: str, folder: Path, access: AccessPolicy, *, max_bytes: int, timeout: float = 1800.0
) -> DownloadedFile:
    """Download the file at an ``https:``, ``http:`` or ``file:`` URL to `folder`.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or the server is unreachable.
    """
    scheme, path = _split(url)
    target = folder / safe_name(path.rsplit("/", 1)[-1])
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        if scheme == "file":
            await anyio.to_thread.run_sync(_copy, access.resolve_file_url(url), part, max_bytes)
        else:
            with anyio.fail_after(timeout):
                await _download(url, part, access, max_bytes)
        os.replace(part, target)
    except TimeoutError:
        raise timed_out(f"{url[:120]} was not downloaded within {timeout:g} s") from None
    finally:
        part.unlink(missing_ok=True)
    return await _describe(target, url)


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise bad_request(f"URL {url[:120]!r}: {error}") from None
    return parts.scheme, parts.path


def _copy(source: Path, target: Path, max_bytes: int) -> None:
    if source.stat().st_size > max_bytes:
        raise bad_request(f"file {str(source)[:120]!r} exceeds the limit of {max_bytes} bytes")
    shutil.copyfile(source, target)


async def _download(url: str, target: Path, access: AccessPolicy, max_bytes: int) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=_IDLE, follow_redirects=False) as client:
        for _ in range(_REDIRECTS + 1):
            access.check_url(url)  # redirect targets are checked as well
            try:
                async with client.stream("GET", url) as response:
                    if not response.has_redirect_location:
                        await _store(response, target, max_bytes)
                        return
                    url = urljoin(url, response.headers["location"])
            except httpx.TimeoutException as error:
                raise timed_out(f"{url[:120]}: {error!r}") from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise peer_failed(f"{url[:120]}: {error!r}") from error
    raise peer_failed(f"{url[:120]}: more than {_REDIRECTS} redirects")


async def _store(response: httpx.Response, target: Path, max_bytes: int) -> None:
    if response.status_code != 200:
        raise _status_error(str(response.url), response.status_code)
    received = 0
    async with await anyio.open_file(target, "xb") as file:
        async for block in response.aiter_bytes(_CHUNK):
            received += len(block)
            if received > max_bytes:
                raise bad_request(f"{str(response.url)[:120]} exceeds the limit of {max_bytes} bytes")
            await file.write(block)


def _status_error(url: str, status: int) -> BridgeError:
    if status in (404, 410):
        return not_found(f"{url[:120]} answered with status {status}")
    return peer_failed(f"{url[:120]} answered with status {status}")
