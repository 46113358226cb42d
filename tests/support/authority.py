"""A certificate hierarchy for tests: a root CA, an organisation's CA, and the files of its nodes."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from hypha_net.identity import Identity, load_identity

DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: Ed25519PrivateKey

    def pem(self) -> bytes:
        """Return the certificate as PEM."""
        return self.certificate.public_bytes(ser.Encoding.PEM)


def issue(
    name: str,
    issuer: Issued | None,
    *,
    ca: bool,
    role: str | None = None,
    valid: tuple[dt.timedelta, dt.timedelta] = (-DAY, 30 * DAY),
    key: Ed25519PrivateKey | None = None,
) -> Issued:
    """Make a certificate: self-signed without an issuer, for a new key unless one is given."""
    key = key or Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + valid[0])
        .not_valid_after(now + valid[1])
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if not ca:
        names: list[x509.GeneralName] = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("0.0.0.0"))]
        if role is not None:
            names.append(x509.UniformResourceIdentifier(f"hypha://role/{role}"))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Issued(builder.sign(issuer.key if issuer else key, None), key)


@dataclass
class Authority:
    """A root CA and one organisation's CA, which write the files of nodes into `folder`."""

    folder: Path
    name: str = "acme"
    root: Issued = field(init=False)
    org: Issued = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root = issue(f"{self.name} root", None, ca=True)
        self.org = issue(f"{self.name} org", self.root, ca=True)

    def files(
        self, name: str, role: str | None = None, valid: tuple[dt.timedelta, dt.timedelta] = (-DAY, 30 * DAY)
    ) -> tuple[Path, Path, Path]:
        """Write certificate, key and trust bundle of a new node."""
        node = issue(name, self.org, ca=False, role=role, valid=valid)
        cert, key, trust = (self.folder / f"{name}-{kind}.pem" for kind in ("cert", "key", "trust"))
        cert.write_bytes(node.pem() + self.org.pem())
        key.write_bytes(node.key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption()))
        key.chmod(0o600)
        trust.write_bytes(self.org.pem() + self.root.pem())
        return cert, key, trust

    def identity(self, name: str, role: str | None = None) -> Identity:
        """Make and load the identity of a new node."""
        return load_identity(*self.files(name, role))

    def renew(self, name: str, lasting: dt.timedelta, role: str | None = None) -> None:
        """Write another certificate for the key of an existing node."""
        key = ser.load_pem_private_key((self.folder / f"{name}-key.pem").read_bytes(), None)
        assert isinstance(key, Ed25519PrivateKey)
        node = issue(name, self.org, ca=False, role=role, valid=(-DAY, lasting), key=key)
        (self.folder / f"{name}-cert.pem").write_bytes(node.pem() + self.org.pem())

    def revocations(self, *revoked: int, of_root: tuple[int, ...] = ()) -> Path:
        """Write revocation lists of both CAs: the organisation's with `revoked`, the root's with `of_root`."""
        now = dt.datetime.now(dt.UTC)
        data = b""
        for ca, serials in ((self.root, of_root), (self.org, revoked)):
            builder = (
                x509.CertificateRevocationListBuilder()
                .issuer_name(ca.certificate.subject)
                .last_update(now - DAY)
                .next_update(now + 30 * DAY)
            )
            for serial in serials:
                entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - DAY)
                builder = builder.add_revoked_certificate(entry.build())
            data += builder.sign(ca.key, None).public_bytes(ser.Encoding.PEM)
        path = self.folder / "crls.pem"
        path.write_bytes(data)
        return path
