"""Downloads of a job from the Hugging Face Hub and from what a URI names, bounded in size and time.

`access_policy` is asked first. A file appears in the job's folder when it is complete and checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Downloads:
    """Brings to a job's folder what its owner's policy allows."""

    access: AccessPolicy
    storage: TaskStorage
    files: PeerFiles | None = None
    """Pulls from peers; ``sha256:`` needs it."""
    timeout: float = 1800.0
    """Seconds for all that is downloaded at once."""

    async def from_hub(self, reference: HuggingFaceReference, folder: PurePosixPath) -> list[FetchedFile]:
        """Download files of a repository to `folder` of the job, under their names in the repository.

        Raises:
            BridgeError: not allowed, not found, too large, too slow, or the Hub is unreachable.
        """
        check_reference(reference, self.access)
        try:
            with anyio.fail_after(self.timeout):
                return [await self._from_hub(HubSource(reference, name), folder) for name in reference.filenames]
        except TimeoutError:
            raise timed_out(
                f"repository {reference.repository!r} was not downloaded within {self.timeout:g} s"
            ) from None

    async def _from_hub(self, source: HubSource, folder: PurePosixPath) -> FetchedFile:
        with self._staged() as part:
            fetched = await fetch_content(source, part, self.storage)
            kind, _, origin = source.origin.partition(":")
            return self._publish(part, folder / source.filename, fetched, source=kind, origin=origin)

    async def from_uri(self, url: str, folder: PurePosixPath, name: str | None = None) -> FetchedFile:
        """Download the file that a URI names to `folder` of the job.

        Args:
            url: ``https:``, ``http:`` or ``file:`` URL, ``s3://bucket/key``, or ``sha256:`` with 64 hex digits.
            folder: where to put it.
            name: its name there, by default the last part of the URI's path.

        Raises:
            BridgeError: not allowed, not found, too large, too slow, or nobody who has it can be reached.
        """
        target = folder / (name or _name_of(url))
        try:
            with self._staged() as part, anyio.fail_after(self.timeout):
                fetched = await self._fetch_uri(url, part)
                return self._publish(part, target, fetched, source=redact_urls(url))
        except TimeoutError:
            raise timed_out(f"{shown_url(url)} was not downloaded within {self.timeout:g} s") from None

    async def all_from_uri(self, url: str, folder: PurePosixPath) -> list[FetchedFile]:
        """Download the file that a URI names, or all files of the folder that a ``file:`` URL names, to `folder`.

        Raises:
            BridgeError: as `from_uri`.
        """
        if _split(url).scheme == "file":
            source = self.access.resolve_file_url_path(url)
            if await self.storage.run(source.is_dir):
                return await self._copy_folder(source, url, folder)
        return [await self.from_uri(url, folder)]

    async def _copy_folder(self, source: Path, url: str, folder: PurePosixPath) -> list[FetchedFile]:
        with self._staged() as part:
            found = await self.storage.run(copy_local_tree, str(source), part, self.access, self.storage)
            return [
                self._publish(part / name, folder / name, each, source=f"{url}/{name}") for name, each in found.items()
            ]

    async def _fetch_uri(self, url: str, part: Path) -> FetchedContent:
        access, storage, scheme = self.access, self.storage, _split(url).scheme
        if scheme == "file":
            found = access.resolve_file_url(url)
            return await storage.run(copy_local_file, found, part, access, storage)
        if scheme == "s3":
            return await fetch_content(_s3_source(url, access), part, storage)
        if scheme == "sha256" and self.files is not None:
            pulled = await fetch_by_sha256(url, part, self.files, access.holder_faults)
            return FetchedContent(pulled.size, pulled.digest)
        access.check_url(url)
        return await fetch_content(HttpSource(url, access), part, storage)

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """Yield the path of an incomplete file; remove it on exit, if it is still there."""
        with self.storage.files.staged() as path:
            try:
                yield path
            except StorageExceededError as error:
                raise to_bridge_error(error) from error
            except FetchError as error:
                raise from_fetch_error(error) from error

    def _publish(self, staged: Path, target: PurePosixPath, fetched: FetchedContent, **metadata: str) -> FetchedFile:
        """Move a complete file into the job's folder."""
        self.storage.files.publish(staged, target)
        return fetched_file(target, fetched.size, fetched.digest, **metadata)


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
