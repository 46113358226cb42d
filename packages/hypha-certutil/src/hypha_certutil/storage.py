"""Where certificates, keys and lists are kept: one folder, names that tell what is inside, keys for their owner only.

Comes after `authority`, which makes what is kept here. Nothing that exists is overwritten unless the caller says so;
a revocation list, which exists to be replaced, is replaced in one step.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from hypha_certutil.authority import Authority, check_name, ed25519_key
from hypha_certutil.errors import CertutilError

PRIVATE = 0o600
PUBLIC = 0o644


@dataclass(frozen=True, slots=True)
class Names:
    """The files of one name in one folder."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        """The certificate; for a node followed by its intermediates."""
        return self.folder / f"{self.name}-cert.pem"

    @property
    def key(self) -> Path:
        """The private key."""
        return self.folder / f"{self.name}-key.pem"

    @property
    def trust(self) -> Path:
        """Organisation CA and root CA."""
        return self.folder / f"{self.name}-trust.pem"

    @property
    def request(self) -> Path:
        """A request that waits for the authority."""
        return self.folder / f"{self.name}-request.pem"

    @property
    def crl(self) -> Path:
        """A CA's own revocation list."""
        return self.folder / f"{self.name}-crl.pem"


def names_in(folder: Path, name: str) -> Names:
    """The file names of `name` in `folder`.

    Raises:
        CertutilError: `name` cannot be part of a file name.
    """
    return Names(folder, check_name(name))


def key_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as PKCS#8 version 1, which every TLS library reads."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def bundle_pem(certificates: Iterable[x509.Certificate]) -> bytes:
    """Certificates one after the other."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


@dataclass(frozen=True, slots=True)
class Output:
    """One file to write."""

    path: Path
    data: bytes
    mode: int = PUBLIC


def write_all(outputs: Sequence[Output], *, force: bool) -> None:
    """Write files, all or, if one of them exists and `force` is not given, none.

    Raises:
        CertutilError: a file exists, or a folder cannot be written to.
    """
    there = [str(output.path) for output in outputs if output.path.exists() or output.path.is_symlink()]
    if there and not force:
        raise CertutilError(
            f"{', '.join(there)}: exists already; choose another name or folder, or replace it with --force"
        )
    for output in outputs:
        _write(output, replace=force)


def replace(output: Output) -> None:
    """Write one file in place of what is there, in one step.

    Raises:
        CertutilError: the folder cannot be written to.
    """
    _write(output, replace=True)


def _write(output: Output, *, replace: bool) -> None:
    """Create the file with its final mode, so that a key is at no moment readable by others."""
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
        CertutilError: a file is missing or malformed, or key and certificate do not belong together.
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
        CertutilError: the file is missing, malformed, encrypted or holds another kind of key.
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
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise CertutilError(f"{path}: holds no readable certificate: {error}") from error


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """Read a certificate request.

    Raises:
        CertutilError: the file is missing or malformed.
    """
    try:
        return x509.load_pem_x509_csr(_read(path))
    except ValueError as error:
        raise CertutilError(f"{path}: holds no readable certificate request: {error}") from error


def read_crl(path: Path) -> x509.CertificateRevocationList:
    """Read a revocation list.

    Raises:
        CertutilError: the file is missing or malformed.
    """
    try:
        return x509.load_pem_x509_crl(_read(path))
    except ValueError as error:
        raise CertutilError(f"{path}: holds no readable revocation list: {error}") from error


def write_crl(names: Names, crl: x509.CertificateRevocationList) -> Path:
    """Write a CA's list, and gather the lists of all CAs of the folder in ``crls.pem`` for the nodes.

    A node checks its peers' whole chains, so it needs the list of every CA: one file that holds them all.

    Returns:
        The path of ``crls.pem``.
    """
    replace(Output(names.crl, crl.public_bytes(Encoding.PEM)))
    gathered = names.folder / "crls.pem"
    replace(Output(gathered, b"".join(_read(path) for path in sorted(names.folder.glob("*-crl.pem")))))
    return gathered


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertutilError(f"{path}: cannot be read: {error.strerror or error}") from error
