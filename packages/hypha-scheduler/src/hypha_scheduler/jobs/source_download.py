"""Models and preprocessors in an S3 bucket, at a URL or named by their SHA-256: fetched and unpacked by this scheduler.

The connectors are those of the workers (`hypha_net.connectors`); what is fetched here comes from the job's owner, who
may name any bucket and host, but redirects and names lead to no private network unless it is listed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread

from hypha_net import content_directory, retries, transfer
from hypha_net.connectors.address_check import Network, is_allowed_address
from hypha_net.connectors.content import ContentSource, ContentStorage, fetch_content
from hypha_net.connectors.errors import FetchError, not_allowed, not_found, source_failed
from hypha_net.connectors.http_source import HttpSource
from hypha_net.connectors.s3_client import S3Client, S3Settings
from hypha_net.connectors.s3_source import S3Object
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_net.redaction import shown_url
from hypha_proto.file_archive import ArchiveError, is_archive, unpack_archive
from hypha_proto.job_spec import UriReference
from hypha_proto.whole_directory import replace_directory
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ArtifactTable, SourceTable
from hypha_scheduler.jobs.source_tables import S3Table

_log = logging.getLogger(__name__)

PRESIGNED_LIFE: Final = timedelta(days=7)
"""The longest that S3 allows."""
RESERVE: Final = 256 * 10**6
"""Bytes of the disk that no download uses."""
TIMEOUT: Final = 6 * 3600.0
"""Seconds for one download."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """``[scheduler.connectors]``: the S3 service, and private networks that downloads may connect to."""

    networks: tuple[Network, ...] = ()
    s3: S3Client = field(default_factory=lambda: S3Client(S3Settings()), compare=False)

    def check_url(self, url: str) -> None:
        """See `HttpAccess.check_url`."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise not_allowed(f"{shown_url(url)} is not an http or https URL")

    def allowed_addresses(self, host: str, addresses: Sequence[str]) -> list[str]:
        """See `HttpAccess.allowed_addresses`."""
        allowed = [address for address in addresses if is_allowed_address(address, self.networks)]
        if addresses and not allowed:
            raise not_allowed(
                f"host {host!r} has the address {addresses[0]}, which is not public: list its network in "
                "scheduler.connectors.networks"
            )
        return allowed

    def check_bucket(self, bucket: str) -> None:
        """See `S3Access.check_bucket`."""
        settings = self.s3.settings
        if settings.endpoint is None and settings.region is None:
            raise not_allowed(
                f"bucket {bucket!r}: this scheduler knows no S3 service: set scheduler.connectors.s3_region or "
                "s3_endpoint"
            )


def source_access(networks: Sequence[str], settings: S3Settings) -> SourceAccess:
    """Return the access that ``[scheduler.connectors]`` describes."""
    return SourceAccess(tuple(ip_network(network) for network in networks), S3Client(settings))


class _DiskStorage(ContentStorage):
    """Stores content on this scheduler's disk, as long as there is room; has no cache."""

    def reserve(self, path: Path, size: int) -> None:
        """See `ContentStorage.reserve`."""
        present = path.stat().st_size if path.exists() else 0
        room = room_for_downloads(path.parent)
        if size - present > room:
            raise JobFailedError(
                f"a file of {size} bytes is to be downloaded, and the disk has room for {present + room}: free "
                f"space for {path.parent}"
            )


@dataclass(frozen=True, slots=True)
class SourceDownloads:
    """Fetches what tables name by `SourceTable.remote_uri`, and tells workers where it is."""

    endpoint: Endpoint
    access: SourceAccess = field(default_factory=SourceAccess)

    async def reference(self, key: str, table: ArtifactTable) -> UriReference:
        """Return where workers fetch a table's file.

        Args:
            key: the table, for errors: ``model``.
            table: names it.

        Raises:
            JobFailedError: the URL is to be presigned, and this scheduler has no keys.
        """
        assert table.remote_uri is not None
        if table.s3 is not None and table.s3.presigned:
            try:
                return UriReference(value=await presign(self.access, table.s3))
            except JobFailedError as error:
                raise JobFailedError(f"{key}.{error}") from None
        return UriReference(value=table.remote_uri)

    async def fetch(self, key: str, table: SourceTable, folder: Path) -> None:
        """Fetch a table's file to `folder`, which appears when it is complete; an archive is unpacked there.

        Raises:
            JobFailedError: it cannot be fetched, unpacked or stored.
        """
        uri = table.remote_uri
        assert uri is not None
        what = f"{key}.{table.source}: {shown_url(uri)}"
        part = folder.with_name(f"{folder.name}.fetched")  # a folder: a transfer keeps files beside its own
        try:
            await anyio.to_thread.run_sync(_make_empty, part)
            with anyio.fail_after(TIMEOUT):
                await self._fetch_to(uri, part / "file")
            await anyio.to_thread.run_sync(_unpack, part / "file", folder, _name_of(uri))
        except FetchError as error:
            raise JobFailedError(f"{key}.{table.source}: {error.detail}") from None
        except TimeoutError:
            raise JobFailedError(f"{what} was not fetched within {TIMEOUT:g} s") from None
        except (ArchiveError, OSError) as error:
            raise JobFailedError(f"{what} cannot be used: {error}") from None
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial(shutil.rmtree, part, ignore_errors=True))

    async def _fetch_to(self, uri: str, part: Path) -> None:
        parts = urlsplit(uri)
        source: ContentSource
        if parts.scheme == "sha256":
            await self._fetch_by_sha256(parts.path, part)
            return
        if parts.scheme == "file":
            await anyio.to_thread.run_sync(_copy, Path(unquote(parts.path)), part, abandon_on_cancel=True)
            return
        if parts.scheme == "s3":
            source = S3Object(parts.netloc, unquote(parts.path.removeprefix("/")), self.access)
        else:
            source = HttpSource(uri, self.access)
        found = await fetch_content(source, part, _DiskStorage())
        _log.info("%s: %d bytes, %s", source.name, found.size, found.digest)

    async def _fetch_by_sha256(self, digits: str, part: Path) -> None:
        digest = f"sha256:{digits}"
        holders = await self._find_holders(digits)
        failures: list[str] = []
        ends = anyio.current_time() + TIMEOUT
        for number, holder in enumerate(holders):
            request = content_directory.content_request(digits)
            seconds = (ends - anyio.current_time()) / (len(holders) - number)  # a slow one leaves time for the others
            room = room_for_downloads(part.parent)
            try:
                await transfer.pull(
                    self.endpoint, holder.peer, request, part, digest=digest, timeout=seconds, max_bytes=room
                )
            except NetError as error:
                failures.append(f"{holder.peer}: {error}")
            else:
                return
        if not failures:
            raise not_found(f"{digest}: no peer announces it: provide it with hypha-data provide FILE")
        raise source_failed(f"{digest}: none of its holders could provide it: {'; '.join(failures)}")

    async def _find_holders(self, digits: str) -> Sequence[content_directory.ContentHolder]:
        """Look up who has content; a scheduler that has just started may not be connected to a gateway yet."""
        try:
            return await retries.LOOKUP.retry(lambda: content_directory.find_holders(self.endpoint, digits))
        except NetError as error:
            raise source_failed(f"sha256:{digits}: its holders cannot be looked up: {error}") from error


async def presign(access: SourceAccess, table: S3Table) -> str:
    """Return a URL of an object that anybody may read, for `PRESIGNED_LIFE`; it is secret.

    Raises:
        JobFailedError: this scheduler has no keys, or knows no S3 service.
    """
    if access.s3.settings.secret_key is None:
        raise JobFailedError(
            "s3.presigned: this scheduler has no keys to sign with: set scheduler.connectors.s3_access_key and "
            "s3_secret_key"
        )
    try:
        access.check_bucket(table.bucket)
    except FetchError as error:
        raise JobFailedError(f"s3: {error.detail}") from None
    return await access.s3.run(lambda: access.s3.presign(table.bucket, table.key, PRESIGNED_LIFE))


def room_for_downloads(folder: Path) -> int:
    """Return how many bytes downloads may store on a folder's disk."""
    return max(0, shutil.disk_usage(folder).free - RESERVE)


def _copy(source: Path, target: Path) -> None:
    _DiskStorage().reserve(target, source.stat().st_size)
    shutil.copyfile(source, target)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _unpack(part: Path, folder: Path, name: str) -> None:
    with replace_directory(folder) as target:
        if is_archive(part):
            unpack_archive(part, target)
        else:
            part.rename(target / name)


def _name_of(uri: str) -> str:
    return unquote(urlsplit(uri).path).rpartition("/")[2] or "file"
