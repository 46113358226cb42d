"""Downloads of a job from the Hugging Face Hub and from what a URI names, bounded in size and time.

`access_policy` is asked first. A file appears in the job's folder when it is complete and checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

import anyio

from hypha_net.connectors.content import FetchedContent, fetch_content
from hypha_net.connectors.errors import FetchError
from hypha_net.connectors.http_source import HttpSource
from hypha_net.connectors.s3_source import S3Object
from hypha_net.redaction import redact_urls, shown_url
from hypha_proto.bridge_api import FetchedFile
from hypha_proto.job_spec import HuggingFaceReference
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.content_holders import fetch_by_sha256
from hypha_worker.connectors.hub_source import HubSource, check_reference
from hypha_worker.connectors.local_files import copy_local_file, copy_local_tree
from hypha_worker.connectors.peer_files import PeerFiles, fetched_file
from hypha_worker.errors import StorageExceededError, bad_request, from_fetch_error, timed_out, to_bridge_error
from hypha_worker.task_files import safe_name
from hypha_worker.task_storage import TaskStorage


@contextmanager
def _staged(storage: TaskStorage) -> Iterator[Path]:
    """Yield the path of an incomplete file; remove it on exit, if it is still there."""
    with storage.files.staged() as path:
        try:
            yield path
        except StorageExceededError as error:
            raise to_bridge_error(error) from error
        except FetchError as error:
            raise from_fetch_error(error) from error


async def download_from_hub(
    reference: HuggingFaceReference,
    folder: PurePosixPath,
    access: AccessPolicy,
    *,
    storage: TaskStorage,
    timeout: float = 1800.0,
) -> list[FetchedFile]:
    """Download files of a repository to `folder` of the job, under their names in the repository.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or the Hub is unreachable.
    """
    check_reference(reference, access)
    try:
        with anyio.fail_after(timeout):
            return [
                await _download_from_hub(HubSource(reference, name), folder, storage) for name in reference.filenames
            ]
    except TimeoutError:
        raise timed_out(f"repository {reference.repository!r} was not downloaded within {timeout:g} s") from None


async def _download_from_hub(source: HubSource, folder: PurePosixPath, storage: TaskStorage) -> FetchedFile:
    with _staged(storage) as part:
        fetched = await fetch_content(source, part, storage)
        kind, _, origin = source.origin.partition(":")
        return _publish(part, folder / source.filename, fetched, storage, source=kind, origin=origin)


async def download_from_uri(
    url: str,
    folder: PurePosixPath,
    access: AccessPolicy,
    *,
    storage: TaskStorage,
    files: PeerFiles | None = None,
    name: str | None = None,
    timeout: float = 1800.0,
) -> FetchedFile:
    """Download the file that a URI names to `folder` of the job.

    Its name there is `name`, by default the last part of the URI's path.

    Args:
        url: ``https:``, ``http:`` or ``file:`` URL, ``s3://bucket/key``, or ``sha256:`` with 64 hex digits.
        folder: where to put it.
        access: the owner's policy.
        storage: the job's storage.
        files: pulls from peers; ``sha256:`` needs it.
        name: name of the file.
        timeout: seconds for all of it.

    Raises:
        BridgeError: not allowed, not found, too large, too slow, or nobody who has it can be reached.
    """
    target = folder / (name or _name_of(url))
    try:
        with _staged(storage) as part, anyio.fail_after(timeout):
            fetched = await _fetch_uri(url, part, access, storage, files)
            return _publish(part, target, fetched, storage, source=redact_urls(url))
    except TimeoutError:
        raise timed_out(f"{shown_url(url)} was not downloaded within {timeout:g} s") from None


async def download_all_from_uri(
    url: str, folder: PurePosixPath, access: AccessPolicy, *, storage: TaskStorage, files: PeerFiles
) -> list[FetchedFile]:
    """Download the file that a URI names, or all files of the folder that a ``file:`` URL names, to `folder`.

    Raises:
        BridgeError: as `download_from_uri`.
    """
    if _split(url).scheme == "file":
        source = access.resolve_file_url_path(url)
        if await storage.run(source.is_dir):
            return await _copy_folder(source, url, folder, access, storage)
    return [await download_from_uri(url, folder, access, storage=storage, files=files)]


async def _copy_folder(
    source: Path, url: str, folder: PurePosixPath, access: AccessPolicy, storage: TaskStorage
) -> list[FetchedFile]:
    with _staged(storage) as part:
        found = await storage.run(copy_local_tree, str(source), part, access, storage)
        return [
            _publish(part / name, folder / name, each, storage, source=f"{url}/{name}") for name, each in found.items()
        ]


async def _fetch_uri(
    url: str, part: Path, access: AccessPolicy, storage: TaskStorage, files: PeerFiles | None
) -> FetchedContent:
    scheme = _split(url).scheme
    if scheme == "file":
        found = access.resolve_file_url(url)
        return await storage.run(copy_local_file, found, part, access, storage)
    if scheme == "s3":
        return await fetch_content(_s3_source(url, access), part, storage)
    if scheme == "sha256" and files is not None:
        pulled = await fetch_by_sha256(url, part, files, access.holder_faults)
        return FetchedContent(pulled.size, pulled.digest)
    access.check_url(url)
    return await fetch_content(HttpSource(url, access), part, storage)


def _s3_source(url: str, access: AccessPolicy) -> S3Object:
    parts = _split(url)
    if parts.query or parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
        raise bad_request(f"value: {shown_url(url)!r} has more than bucket and key: write s3://bucket/key")
    return S3Object(parts.netloc, unquote(parts.path.removeprefix("/")), access)


def _name_of(url: str) -> str:
    parts = _split(url)
    return safe_name(f"sha256-{parts.path}" if parts.scheme == "sha256" else parts.path.rsplit("/", 1)[-1])


def _split(url: str) -> SplitResult:
    if not url.isprintable():
        raise bad_request(f"value: {shown_url(url)!a} has characters that no URL has: write them as %XX")
    try:
        return urlsplit(url)
    except ValueError as error:
        raise bad_request(f"value: {shown_url(url)!r} is no URL ({error}): write https://host/path") from None


def _publish(
    staged: Path, target: PurePosixPath, fetched: FetchedContent, storage: TaskStorage, **metadata: str
) -> FetchedFile:
    """Move a complete file into the job's folder."""
    storage.files.publish(staged, target)
    return fetched_file(target, fetched.size, fetched.digest, **metadata)
