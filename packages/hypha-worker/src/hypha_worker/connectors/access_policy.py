"""The owner's policy on what jobs may access: hosts, network addresses, Hub repositories, S3 buckets, local folders.

Pure apart from resolving paths and opening files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from hypha_net.connectors.address_check import Network, is_allowed_address, literal_networks
from hypha_net.connectors.s3_client import S3Client, S3Settings
from hypha_net.redaction import shown_url
from hypha_worker.connectors.content_holders import HolderFaults
from hypha_worker.errors import bad_request, not_allowed, not_found
from hypha_worker.openat import IrregularFileError, LinkInPathError, open_regular, open_root


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Patterns (``*`` matches anything) of hosts, Hub repositories and S3 buckets, and folders of readable files."""

    hosts: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ("*",)
    roots: tuple[Path, ...] = ()
    networks: tuple[Network, ...] = ()
    """Networks that are not public and may be connected to all the same, besides numeric addresses in `hosts`."""
    buckets: tuple[str, ...] = ()
    s3: S3Client = field(default_factory=lambda: S3Client(S3Settings()), compare=False)
    """Reads buckets with the owner's endpoint and credentials."""
    holder_faults: HolderFaults = field(default_factory=HolderFaults, compare=False)

    def check_url(self, url: str) -> None:
        """Refuse a URL whose host is not allowed.

        Raises:
            BridgeError: the scheme is not http or https, or the host is not in ``connectors.hosts``.
        """
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError as error:
            raise bad_request(f"value: {shown_url(url)!r} is no URL ({error}): write https://host/path") from None
        if parts.scheme not in ("http", "https") or not host:
            raise bad_request(
                f"value: {shown_url(url)!r} is not an https, http, file, s3 or sha256 URL: use one of these schemes"
            )
        if not any(fnmatchcase(host.lower(), pattern.lower()) for pattern in self.hosts):
            raise not_allowed(f"value: host {host!r} is not in connectors.hosts of this worker: its owner may add it")

    def allowed_addresses(self, host: str, addresses: Sequence[str]) -> list[str]:
        """Return those of a host's addresses that downloads may connect to.

        Raises:
            BridgeError: it has addresses, and none is allowed.
        """
        networks = (*self.networks, *literal_networks(self.hosts))
        allowed = [address for address in addresses if is_allowed_address(address, networks)]
        if addresses and not allowed:
            raise not_allowed(
                f"value: host {host!r} has the address {addresses[0]}, which is not public: the worker's owner "
                "may list its network in connectors.networks"
            )
        return allowed

    def check_repository(self, repository: str) -> None:
        """Refuse a Hub repository that is not allowed.

        Raises:
            BridgeError: it is not in ``connectors.repositories``.
        """
        if not any(fnmatchcase(repository, pattern) for pattern in self.repositories):
            raise not_allowed(
                f"repository: {repository!r} is not in the worker's connectors.repositories: ask its owner"
            )

    def check_bucket(self, bucket: str) -> None:
        """Refuse an S3 bucket that is not allowed.

        Raises:
            BridgeError: it is not in ``connectors.buckets``.
        """
        if not any(fnmatchcase(bucket, pattern) for pattern in self.buckets):
            raise not_allowed(f"bucket: {bucket!r} is not in connectors.buckets of this worker: its owner may add it")

    def resolve_file_url(self, url: str) -> Path:
        """Return the file that a ``file:`` URL names.

        Raises:
            BridgeError: it is under none of ``connectors.roots``, or does not exist.
        """
        path = self.resolve_file_url_path(url)
        if not path.is_file():
            raise not_found(f"file {str(path)!r} does not exist")
        return path

    def resolve_file_url_path(self, url: str) -> Path:
        """Return the file or folder that a ``file:`` URL names; it need not exist.

        Raises:
            BridgeError: it is under none of ``connectors.roots``.
        """
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise bad_request(f"value: {shown_url(url)!r} names a host other than this one: use file:///path")
        return self.resolve_path(unquote(parts.path), "value")

    def resolve_path(self, text: str, name: str = "path") -> Path:
        """Return the file or folder of an absolute path, with symbolic links resolved; it need not exist.

        Args:
            text: the path.
            name: field that holds it, for errors.

        Raises:
            BridgeError: it is not absolute, or under none of ``connectors.roots``.
        """
        if not text.startswith("/") or "\0" in text:
            raise bad_request(f"{name}: {text!r} is not an absolute path: begin it with /")
        path = Path(text).resolve()
        if not any(root.resolve() in path.parents for root in self.roots):
            raise not_allowed(
                f"{name}: {str(path)!r} is under none of the worker's connectors.roots: ask its owner to add one"
            )
        return path

    def open_file(self, path: Path) -> FileIO:
        """Open a regular file that `resolve_path` or `resolve_file_url` has returned, for reading.

        Raises:
            BridgeError: it was moved or replaced meanwhile.
            OSError: it cannot be opened.
        """
        for root in (root.resolve() for root in self.roots):
            if root in path.parents:
                with open_root(root) as folder:
                    return _open_beneath(folder, path.relative_to(root))
        raise not_allowed(f"path: {str(path)!r} is under none of the worker's connectors.roots")


def _open_beneath(folder: int, path: Path) -> FileIO:
    try:
        return open_regular(folder, PurePosixPath(path.as_posix()), links=None)
    except (LinkInPathError, IrregularFileError) as error:
        raise bad_request(f"path: {str(path)!r} was replaced while it was opened ({error.strerror})") from None
