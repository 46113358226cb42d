"""Validation of certificate chains after the handshake: revocation lists, trust bundle and expiry.

OpenSSL verifies a peer's chain only in the handshake. `CertificateVerifier` has the current content of a node's files.
With it `hypha_net._libp2p.security.certificate_monitor` checks every live connection and the node's own certificate.
Certificates and lists follow RFC 5280.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from hypha_net.identity import Identity, common_name

_log = logging.getLogger("hypha_net.certificates")

DAY: Final = 86400.0
WARN_AT: Final = (14 * DAY, 7 * DAY, 3 * DAY, DAY, 6 * 3600.0, 3600.0, 0.0)
"""Remaining seconds at which the expiry of a certificate or revocation list is logged, each once."""

Anchor = tuple[bytes, bytes]
"""Subject and key of a CA: they stay the same when its certificate is renewed."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A certificate of a chain, with the values that every check compares."""

    certificate: x509.Certificate
    issuer: bytes
    serial: int
    expires: float
    anchor: Anchor

    @classmethod
    def from_certificate(cls, certificate: x509.Certificate) -> ChainLink:
        """Extract the compared values. Raises `ValueError` when a field is malformed."""
        expires = certificate.not_valid_after_utc.timestamp()
        issuer, serial = certificate.issuer.public_bytes(), certificate.serial_number
        return cls(certificate, issuer, serial, expires, _anchor(certificate))


Chain = tuple[ChainLink, ...]
"""A verified chain, the node's certificate first."""


@dataclass(frozen=True, slots=True)
class CertificateRejection:
    """Why a chain is no longer valid."""

    reason: Literal["revoked", "expired", "untrusted"]
    detail: str


def parse_chain(encoded: Iterable[bytes]) -> Chain:
    """Parse a chain of DER certificates, as TLS provides it. Raises `ValueError` when one is malformed."""
    return build_chain(x509.load_der_x509_certificate(der) for der in encoded)


def build_chain(certificates: Iterable[x509.Certificate]) -> Chain:
    """Make a chain of certificates, the node's own first. Raises `ValueError` when a field is malformed."""
    return tuple(ChainLink.from_certificate(certificate) for certificate in certificates)


class CertificateVerifier:
    """Checks chains against the trust bundle and revocation lists of an identity."""

    def __init__(self, identity: Identity) -> None:
        """Index the identity's files. Raises `ValueError` when a revocation list is malformed."""
        self._identity = identity
        self._own = build_chain(identity.chain)
        self._anchors = {_anchor(certificate) for certificate in identity.trusted}
        self._issued_cache: dict[Anchor, bool] = {}
        """Cache: whether an anchor issued the last certificate of a chain."""
        self._revoking_lists: dict[tuple[bytes, int], list[x509.CertificateRevocationList]] = {}
        """The lists that contain an issuer and serial; their signatures are verified when needed."""
        for crl in identity.revocations:
            issuer = crl.issuer.public_bytes()
            for entry in crl:
                self._revoking_lists.setdefault((issuer, entry.serial_number), []).append(crl)

    def check(self, chain: Chain, now: float) -> CertificateRejection | None:
        """Return why a chain is invalid at `now` (seconds since the epoch), or None if it is valid."""
        for depth, link in enumerate(chain):
            if now > link.expires:
                expired_on = _time(link.certificate.not_valid_after_utc)
                return CertificateRejection("expired", f"{_named(link.certificate)} expired on {expired_on}")
            if self._is_revoked(link, chain[depth + 1 : depth + 2]):
                issuer = common_name(link.certificate.issuer)
                return CertificateRejection(
                    "revoked", f"{_named(link.certificate)} is in the revocation list of {issuer!r}"
                )
        if not self._is_anchored(chain):
            return CertificateRejection(
                "untrusted", f"trust_pem no longer contains a CA of {_named(chain[0].certificate)}"
            )
        return None

    def check_own(self, now: float) -> CertificateRejection | None:
        """Return why this node's own chain is invalid, as its peers will find; None if it is valid."""
        return self.check(self._own, now)

    def _is_anchored(self, chain: Chain) -> bool:
        """Return whether the bundle trusts a chain: its end, or any part of it if the bundle contains no root."""
        ends = chain[-1:] if self._identity.trust_has_root else chain
        if any(link.anchor in self._anchors for link in ends):
            return True
        last = chain[-1]
        if last.anchor not in self._issued_cache:
            self._issued_cache[last.anchor] = any(_has_issued(ca, last.certificate) for ca in self._identity.trusted)
        return self._issued_cache[last.anchor]

    def _is_revoked(self, link: ChainLink, above: Chain) -> bool:
        """Return whether a certificate is in a list that its issuer signed; an issuer name alone proves nothing."""
        lists = self._revoking_lists.get((link.issuer, link.serial))
        if lists is None:
            return False
        issuers = [*(each.certificate for each in above), *self._identity.trusted]
        return any(_has_signed(ca, crl) for crl in lists for ca in issuers if ca.subject == crl.issuer)

    def expiries(self) -> Iterator[tuple[str, datetime, str]]:
        """Yield name, expiry time, and consequence with remedy, of each of this node's certificates and lists."""
        cert, crls = self._identity.cert_pem, self._identity.crls_pem
        for certificate in self._identity.chain:
            what = f"cert_pem {cert}: {_named(certificate)}"
            yield what, certificate.not_valid_after_utc, "then peers refuse this node: have it renewed for the same key"
        for crl in self._identity.revocations:
            if crl.next_update_utc is not None:
                what = f"crls_pem {crls}: the revocation list of {common_name(crl.issuer)!r}"
                yield what, crl.next_update_utc, "then every new connection is refused: have the list renewed"


class ExpiryWarnings:
    """Logs the expiry of a node's own files in advance, repeatedly as it comes nearer."""

    def __init__(self) -> None:
        self._stage: dict[tuple[str, datetime], int] = {}

    def log_due(self, verifier: CertificateVerifier, now: float) -> None:
        """Log each expiry that has reached a further stage of `WARN_AT`."""
        for what, end, remedy in verifier.expiries():
            left = end.timestamp() - now
            stage = sum(left <= limit for limit in WARN_AT)
            if stage <= self._stage.get((what, end), 0):
                continue
            self._stage[(what, end)] = stage
            if left <= 0:
                _log.error("%s expired on %s: %s", what, _time(end), remedy.removeprefix("then "))
            else:
                _log.warning("%s expires on %s: %s", what, _time(end), remedy)


def _has_signed(ca: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    try:
        return crl.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):  # a key that cannot sign
        return False


def _has_issued(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (TypeError, ValueError, InvalidSignature):
        return False
    return True


def _anchor(certificate: x509.Certificate) -> Anchor:
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return certificate.subject.public_bytes(), key


def _named(certificate: x509.Certificate) -> str:
    return f"certificate {common_name(certificate.subject)!r} (serial {certificate.serial_number:x})"


def _time(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
