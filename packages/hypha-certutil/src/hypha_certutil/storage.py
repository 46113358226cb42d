"""Storage of certificates, keys and revocation lists: one folder, fixed file names, keys readable by their owner only.

An existing file is not overwritten unless the caller asks for it; a revocation list, which exists to be replaced, is
replaced atomically.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from hypha_certutil.authority import Authority, check_name, ed25519_key
from hypha_certutil.errors import CertutilError

T = TypeVar("T")

PRIVATE = 0o600
PUBLIC = 0o644


class Names:
    """File names of one CA or node in one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.certificate = folder / f"{name}-cert.pem"
        """Certificate, for a node followed by its intermediate CAs."""
        self.key = folder / f"{name}-key.pem"
        """Private key."""
        self.trust = folder / f"{name}-trust.pem"
        """Organisation CA and root CA."""
        self.request = folder / f"{name}-request.pem"
        """Certificate signing request."""
        self.crl = folder / f"{name}-crl.pem"
        """Revocation list of this CA."""


def names_in(folder: Path, name: str) -> Names:
    """Return the file names of `name` in `folder`.

    Raises:
        CertutilError: `name` cannot be part of a file name.
    """
    return Names(folder, check_name(name))


def key_pem(key: Ed25519PrivateKey) -> bytes:
    """Encode a private key as PKCS#8 version 1 (RFC 5208), which every TLS library reads."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def bundle_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Concatenate certificates as PEM."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


@dataclass(frozen=True, slots=True)
class Output:
    """File to write."""

    path: Path
    data: bytes
    mode: int = PUBLIC


def write_all(outputs: Sequence[Output], *, force: bool) -> None:
    """Write all files, or none of them if one exists and `force` is not given.

    Raises:
        CertutilError: a file exists, or a folder cannot be written to.
    """
    existing = [str(output.path) for output in outputs if output.path.exists() or output.path.is_symlink()]
    if existing and not force:
        raise CertutilError(
            f"{', '.join(existing)}: exists already; choose another name or folder, or replace it with --force"
        )
    for output in outputs:
        _write(output, replace=force)


def replace(output: Output) -> None:
    """Write one file atomically in place of an existing one.

    Raises:
        CertutilError: the folder cannot be written to.
    """
    _write(output, replace=True)


def _write(output: Output, *, replace: bool) -> None:
    """Create the file with its final mode, so that a key is never readable by others."""
    path = output.path
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if replace else path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, output.mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(output.data)
            if replace:
                target.replace(path)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CertutilError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_authority(folder: Path, name: str) -> Authority:
    """Read a CA: ``<name>-key.pem``, ``<name>-cert.pem`` and, unless it is a root, ``<name>-trust.pem``.

    Raises:
        CertutilError: a file is missing or malformed, or key and certificate do not match.
    """
    names = names_in(folder, name)
    if not names.key.exists():
        make = "hypha-certutil root, org and node make a root, an organisation under it, and nodes"
        raise CertutilError(f"{names.key}: no CA {name!r} is in this folder; name it, or its folder with --dir. {make}")
    key = read_key(names.key)
    certificate = read_certificates(names.certificate)[0]
    if ed25519_key(certificate, str(names.certificate)) != key.public_key():
        raise CertutilError(f"{names.key}: is not the key of {names.certificate.name}")
    if certificate.issuer == certificate.subject:
        return Authority(key, certificate)
    trust = read_certificates(names.trust)
    if trust[0] != certificate or len(trust) < 2:
        raise CertutilError(f"{names.trust}: must hold {names.certificate.name} first, then the CAs above it")
    return Authority(key, certificate, tuple(trust[1:]))


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key.

    Raises:
        CertutilError: the file is missing, malformed or encrypted, or contains another kind of key.
    """
    try:
        key = load_pem_private_key(_read(path), None)
    except (ValueError, TypeError) as error:
        raise CertutilError(f"{path}: is not an unencrypted PKCS#8 key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise CertutilError(f"{path}: is a {type(key).__name__}; Hypha uses Ed25519 keys only")
    return key


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read the certificates of a PEM file, at least one.

    Raises:
        CertutilError: the file is missing or malformed.
    """
    return _load(path, "certificate", x509.load_pem_x509_certificates)


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """Read a certificate request.

    Raises:
        CertutilError: the file is missing or malformed.
    """
    return _load(path, "certificate request", x509.load_pem_x509_csr)


def read_crl(path: Path) -> x509.CertificateRevocationList:
    """Read a revocation list.

    Raises:
        CertutilError: the file is missing or malformed.
    """
    return _load(path, "revocation list", x509.load_pem_x509_crl)


def write_crl(names: Names, crl: x509.CertificateRevocationList) -> Path:
    """Write a CA's list, and collect the lists of all CAs of the folder in ``crls.pem`` for the nodes.

    A node checks its peers' whole chains, so it needs the lists of all CAs in one file.

    Returns:
        The path of ``crls.pem``.
    """
    replace(Output(names.crl, crl.public_bytes(Encoding.PEM)))
    collected = names.folder / "crls.pem"
    replace(Output(collected, b"".join(_read(path) for path in sorted(names.folder.glob("*-crl.pem")))))
    return collected


def _load(path: Path, what: str, load: Callable[[bytes], T]) -> T:
    try:
        return load(_read(path))
    except ValueError as error:
        raise CertutilError(f"{path}: holds no readable {what}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertutilError(f"{path}: cannot be read: {error.strerror or error}") from error
