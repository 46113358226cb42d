"""Certificates of an organisation for the nodes of a benchmark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hypha_certutil.authority import Authority, make_node, make_org, make_root


class Organisation:
    """Organisation CA that issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._now = datetime.now(UTC) - timedelta(hours=1)
        root = make_root("benchmark-root", Ed25519PrivateKey.generate(), days=120, now=self._now)
        self._org: Authority = make_org("benchmark", Ed25519PrivateKey.generate(), root, days=90, now=self._now)
        self._trust = folder / "trust.pem"
        chain = (self._org.certificate, root.certificate)
        self._trust.write_bytes(b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain))

    def node(self, name: str, role: str | None = None) -> dict[str, str]:
        """Issue a certificate and return the paths of certificate, key and trust bundle."""
        key = Ed25519PrivateKey.generate()
        made = make_node(name, key.public_key(), self._org, role=role, days=60, now=self._now)
        cert, secret = self.folder / f"{name}-cert.pem", self.folder / f"{name}-key.pem"
        cert.write_bytes(made.public_bytes(Encoding.PEM) + self._org.certificate.public_bytes(Encoding.PEM))
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        secret.chmod(0o600)
        return {"cert": str(cert), "key": str(secret), "trust": str(self._trust)}
