"""Identity of a node: certificate, key, trust bundle and revocation lists, and the TLS contexts made from them.

A node has one identity, the Ed25519 key of its certificate, from which its peer id is derived. Files may come from
`hypha-certutil` or from another tool, with keys as PKCS#8 version 2 (RFC 5958) and trust bundles that end at an
intermediate CA. Daemons read them at their start, and again when files change.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from hypha_net.errors import IdentityError
from hypha_proto.ids import PeerId
from hypha_proto.texts import shorten

_log = logging.getLogger(__name__)

ROLE_PREFIX: Final = "hypha://role/"
_NAME_LIMIT: Final = 200
"""Characters that are shown of a name in a certificate, which may be unverified."""
_UNREADABLE: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Errors of `cryptography` for certificates that OpenSSL accepted, on parsing or on access to a field."""
# PKCS#8: version 0 or 1, algorithm 1.3.101.112 (Ed25519), then an octet string that wraps the 32-byte seed
_ED25519_PKCS8: Final = re.compile(rb"\x02\x01[\x00\x01]\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20(.{32})", re.DOTALL)
_PEM_KEY: Final = re.compile(rb"-----BEGIN PRIVATE KEY-----(.+?)-----END PRIVATE KEY-----", re.DOTALL)


FileState = tuple[tuple[int, int, int, int] | None, ...]
"""Device, inode, size and modification time of each file, to detect changes; None where there is no file."""


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """The fields of a certificate that are displayed, and its role."""

    subject: str
    issuer: str
    serial: int
    not_before: float
    """Seconds since the epoch."""
    not_after: float
    """Seconds since the epoch."""
    role: str | None
    peer_id: PeerId

    def __str__(self) -> str:
        return f"certificate {self.subject!r} issued by {self.issuer!r} (serial {self.serial:x}, peer {self.peer_id})"


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's identity; made by `load_identity`."""

    peer_id: PeerId
    certificate: CertificateInfo
    key: Ed25519PrivateKey = field(repr=False)
    chain: tuple[x509.Certificate, ...] = field(repr=False)
    """The node's certificate, then its intermediates."""
    cert_pem: Path
    key_pem: Path
    trust_pem: Path
    crls_pem: Path | None
    trusted: tuple[x509.Certificate, ...] = field(repr=False)
    revocations: tuple[x509.CertificateRevocationList, ...] = field(repr=False)
    trust_has_root: bool
    """Whether every chain of the trust bundle ends at a root in it; the Rust tool's bundles end at the organisation."""
    read_from: FileState = field(repr=False)
    """State of the files when they were read."""

    @property
    def seed(self) -> bytes:
        """The 32 bytes of the private key."""
        return self.key.private_bytes_raw()

    def server_context(self) -> ssl.SSLContext:
        """Make a TLS context for the accepting side. Raises `IdentityError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return self._load(context)

    def client_context(self) -> ssl.SSLContext:
        """Make a TLS context for the dialling side. Raises `IdentityError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # certificates of the Rust tool lack key identifiers
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        # partial chains only where the bundle has no root: with them OpenSSL always stops at the first trusted CA, and
        # does not check the list that could revoke it
        if self.trust_has_root:
            context.verify_flags &= ~ssl.VERIFY_X509_PARTIAL_CHAIN
        else:
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            with _key_file(self.key) as key:
                context.load_cert_chain(self.cert_pem, key)
            context.load_verify_locations(self.trust_pem)
            if self.crls_pem is not None:
                context.load_verify_locations(self.crls_pem)
                full_chain = self.trust_has_root
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN if full_chain else ssl.VERIFY_CRL_CHECK_LEAF
        except (ssl.SSLError, OSError) as error:
            raise IdentityError(f"TLS cannot use {self.cert_pem}, {self.trust_pem}: {error}") from error
        return context


def load_identity(cert_pem: Path, key_pem: Path, trust_pem: Path, crls_pem: Path | None = None) -> Identity:
    """Read and check a node's identity.

    Args:
        cert_pem: the node's certificate, then its intermediates.
        key_pem: its Ed25519 key, PKCS#8 version 1 or 2.
        trust_pem: the CAs whose nodes are trusted.
        crls_pem: the revocation lists of every CA in the chain.

    Raises:
        IdentityError: a file is missing or unusable; the message names the configuration key, the file and the remedy.
    """
    state = _file_state(cert_pem, key_pem, trust_pem, crls_pem)
    chain = _certificates(_read("cert_pem", cert_pem), "cert_pem", cert_pem)
    key = _private_key(_read("key_pem", key_pem), key_pem)
    info = describe_certificate(chain[0], f"cert_pem {cert_pem}")
    if key.public_key().public_bytes_raw() != info.peer_id.public_key:
        raise IdentityError(
            f"key_pem {key_pem} does not belong to cert_pem {cert_pem}: configure the key of this certificate"
        )
    _check_time(info, cert_pem)
    trusted = _certificates(_read("trust_pem", trust_pem), "trust_pem", trust_pem)
    crls = [] if crls_pem is None else _read_crls(_read("crls_pem", crls_pem), crls_pem)
    _check_mode(key_pem)
    return Identity(
        peer_id=info.peer_id,
        certificate=info,
        key=key,
        chain=tuple(chain),
        cert_pem=cert_pem,
        key_pem=key_pem,
        trust_pem=trust_pem,
        crls_pem=crls_pem,
        trusted=tuple(trusted),
        revocations=tuple(crls),
        trust_has_root=_has_roots(trusted),
        read_from=state,
    )


def _check_mode(key_pem: Path) -> None:
    try:
        if os.name == "posix" and key_pem.stat().st_mode & 0o077:
            _log.warning("key_pem %s can be read by other users: run chmod 600 on it", key_pem)
    except OSError as error:
        raise IdentityError(f"key_pem {key_pem} cannot be read: {error.strerror or error}") from error


def reload_identity(identity: Identity) -> Identity:
    """Read the files of an identity again; the peer id must stay the same.

    Raises:
        IdentityError: as `load_identity`, or the files contain another key now.
    """
    fresh = load_identity(identity.cert_pem, identity.key_pem, identity.trust_pem, identity.crls_pem)
    if fresh.peer_id != identity.peer_id:
        raise IdentityError(
            f"cert_pem {identity.cert_pem} and key_pem {identity.key_pem} contain another key now, and so another peer "
            f"id ({fresh.peer_id}; this node is {identity.peer_id}): restart the node to use it, or have the "
            "certificate renewed for the previous key"
        )
    return fresh


def file_state(identity: Identity) -> FileState:
    """Return the current state of an identity's files."""
    return _file_state(identity.cert_pem, identity.key_pem, identity.trust_pem, identity.crls_pem)


def _file_state(*paths: Path | None) -> FileState:
    return tuple(_state_of(path) for path in paths)


def _state_of(path: Path | None) -> tuple[int, int, int, int] | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def read_certificate(encoded: bytes, what: str = "certificate") -> CertificateInfo:
    """Describe a DER certificate of an untrusted source.

    Raises:
        IdentityError: as `describe_certificate`, or it is not a certificate.
    """
    try:
        certificate = x509.load_der_x509_certificate(encoded)
        return _describe(certificate, f"{what} {common_name(certificate.subject)!r}")
    except _UNREADABLE as error:
        raise IdentityError(f"{what} cannot be read: {error}") from None


def describe_certificate(certificate: x509.Certificate, what: str = "certificate") -> CertificateInfo:
    """Describe a certificate.

    Raises:
        IdentityError: its key is not Ed25519, or a field is malformed.
    """
    try:
        return _describe(certificate, what)
    except _UNREADABLE as error:
        raise IdentityError(f"{what} cannot be read: {error}") from None


def _describe(certificate: x509.Certificate, what: str) -> CertificateInfo:
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        kind = type(key).__name__.removeprefix("_")
        raise IdentityError(
            f"{what}: its key is {kind}; Hypha nodes have Ed25519 keys only (hypha-certutil makes them)"
        )
    return CertificateInfo(
        subject=common_name(certificate.subject),
        issuer=common_name(certificate.issuer),
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
        role=_role(certificate),
        peer_id=PeerId.from_public_key(key.public_bytes_raw()),
    )


def common_name(name: x509.Name) -> str:
    """Return a name for display: its common name, or the whole name if it has none, cut to `_NAME_LIMIT`."""
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return shorten(str(found[0].value) if found else name.rfc4514_string(), _NAME_LIMIT)


def _role(certificate: x509.Certificate) -> str | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return next((uri.removeprefix(ROLE_PREFIX) for uri in uris if uri.startswith(ROLE_PREFIX)), None)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = remedy_for(key)
        if isinstance(error, PermissionError):
            remedy = f"give it to the user that runs this node, uid {os.geteuid()} (chown)"
        raise IdentityError(f"{key} {path} cannot be read: {error.strerror or error}; {remedy}") from error


def remedy_for(key: str) -> str:
    """Return the remedy for a missing file that is configured as `key`."""
    if key == "crls_pem":
        return "copy the authorities' revocation lists there, or remove crls_pem"
    return "make it with hypha-certutil node NAME, or configure the path of the file that it wrote"


def _certificates(data: bytes, key: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except _UNREADABLE as error:
        raise IdentityError(f"{key} {path} holds no PEM certificate: {error}") from None


def _has_roots(certificates: list[x509.Certificate]) -> bool:
    subjects = {certificate.subject for certificate in certificates}
    return all(certificate.issuer in subjects for certificate in certificates)


def _private_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    found = _PEM_KEY.search(data)
    if found is not None:
        try:
            seed = _ED25519_PKCS8.search(base64.b64decode(b"".join(found[1].split())))
        except ValueError:
            seed = None
        if seed is not None:
            return Ed25519PrivateKey.from_private_bytes(seed[1])
    try:
        kind = type(load_pem_private_key(data, None)).__name__.removeprefix("_")
    except (ValueError, TypeError) as error:
        raise IdentityError(f"key_pem {path} is not an unencrypted PKCS#8 private key: {error}") from None
    raise IdentityError(f"key_pem {path} is {kind}; Hypha nodes have Ed25519 keys only (hypha-certutil makes them)")


def _check_time(info: CertificateInfo, path: Path) -> None:
    now = datetime.now(UTC).timestamp()
    if now > info.not_after:
        ended = datetime.fromtimestamp(info.not_after, UTC)
        raise IdentityError(
            f"cert_pem {path} expired on {ended:%Y-%m-%d %H:%M} UTC, and it is now {datetime.now(UTC):%Y-%m-%d %H:%M}: "
            "have its authority renew it (hypha-certutil renew), with the same key"
        )
    if now < info.not_before:
        starts = datetime.fromtimestamp(info.not_before, UTC)
        raise IdentityError(f"cert_pem {path} is not valid before {starts:%Y-%m-%d %H:%M} UTC: check the clock")


def _read_crls(data: bytes, path: Path) -> list[x509.CertificateRevocationList]:
    parts = [b"-----BEGIN X509 CRL" + part for part in data.split(b"-----BEGIN X509 CRL")[1:]]
    if not parts:
        raise IdentityError(f"crls_pem {path} holds no PEM revocation list")
    try:
        return [x509.load_pem_x509_crl(part) for part in parts]
    except _UNREADABLE as error:
        raise IdentityError(f"crls_pem {path}: {error}") from None


@contextmanager
def _key_file(key: Ed25519PrivateKey) -> Iterator[str]:
    """Provide the key as a file, because `ssl` loads keys from files only: in memory on Linux, private elsewhere."""
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("hypha-key")
        try:
            os.write(handle, data)
            yield f"/proc/self/fd/{handle}"
        finally:
            os.close(handle)
    else:
        with tempfile.TemporaryDirectory(prefix="hypha-") as folder:
            path = Path(folder) / "key.pem"
            path.touch(mode=0o600)
            path.write_bytes(data)
            yield str(path)
