"""Which certificates still hold: a chain that was verified once, judged anew by lists, trust bundle and clock.

OpenSSL verifies a peer's chain in the handshake and never again. `Trust` is what a node's files say now; the watch in
`hypha_net._libp2p.security.certificate_monitor` asks it about every live connection, and about this node's own
certificate.
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
"""Seconds that a certificate or list has left when its end is told."""

Anchor = tuple[bytes, bytes]
"""Subject and key: what makes a CA the same one although its certificate was renewed."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A certificate of a chain, with what is compared of it every few seconds made once."""

    certificate: x509.Certificate
    issuer: bytes
    serial: int
    end: float
    anchor: Anchor

    @classmethod
    def from_certificate(cls, certificate: x509.Certificate) -> ChainLink:
        """Raises `ValueError` when a field does not parse."""
        end = certificate.not_valid_after_utc.timestamp()
        return cls(certificate, certificate.issuer.public_bytes(), certificate.serial_number, end, _anchor(certificate))


Chain = tuple[ChainLink, ...]
"""A verified chain, the node's certificate first."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a chain does not hold any more."""

    reason: Literal["revoked", "expired", "untrusted"]
    detail: str


def parse_chain(encoded: Iterable[bytes]) -> Chain:
    """The chain in certificates as TLS gives them. Raises `ValueError` for what is none."""
    return build_chain(x509.load_der_x509_certificate(der) for der in encoded)


def build_chain(certificates: Iterable[x509.Certificate]) -> Chain:
    """Certificates, a node's own first, to be judged. Raises `ValueError` when a field does not parse."""
    return tuple(ChainLink.from_certificate(certificate) for certificate in certificates)


class CertificateVerifier:
    """What an identity's files say about chains."""

    def __init__(self, identity: Identity) -> None:
        """Raises `ValueError` when a list does not parse."""
        self._identity = identity
        self._own = build_chain(identity.chain)
        self._anchors = {_anchor(certificate) for certificate in identity.trusted}
        self._issued: dict[Anchor, bool] = {}
        """Ends of chains that are no anchors themselves, and whether one has issued them."""
        self._listing: dict[tuple[bytes, int], list[x509.CertificateRevocationList]] = {}
        """Issuer and serial that stand in a list, and in which; genuine or not."""
        for crl in identity.revocations:
            issuer = crl.issuer.public_bytes()
            for entry in crl:
                self._listing.setdefault((issuer, entry.serial_number), []).append(crl)

    def check(self, chain: Chain, now: float) -> Rejection | None:
        """What is wrong with a chain at a time (seconds since the epoch); none if nothing is."""
        for place, link in enumerate(chain):
            if now > link.end:
                ended = _time(link.certificate.not_valid_after_utc)
                return Rejection("expired", f"{_named(link.certificate)} expired on {ended}")
            if self._is_revoked(link, chain[place + 1 : place + 2]):
                issuer = common_name(link.certificate.issuer)
                return Rejection("revoked", f"{_named(link.certificate)} is in the list of {issuer!r}")
        if not self._is_anchored(chain):
            return Rejection("untrusted", f"trust_pem holds no CA of {_named(chain[0].certificate)} any more")
        return None

    def check_own(self, now: float) -> Rejection | None:
        """What is wrong with this node's own chain, which its peers judge alike."""
        return self.check(self._own, now)

    def _is_anchored(self, chain: Chain) -> bool:
        """Whether the bundle vouches for a chain: for its end, or for any part where bundles end below the root."""
        ends = chain[-1:] if self._identity.trust_has_root else chain
        if any(link.anchor in self._anchors for link in ends):
            return True
        last = chain[-1]
        if last.anchor not in self._issued:
            self._issued[last.anchor] = any(_has_issued(ca, last.certificate) for ca in self._identity.trusted)
        return self._issued[last.anchor]

    def _is_revoked(self, link: ChainLink, above: Chain) -> bool:
        """Whether a list holds a certificate that is its issuer's by signature: a name alone says nothing."""
        listing = self._listing.get((link.issuer, link.serial))
        if listing is None:
            return False
        issuers = [*(each.certificate for each in above), *self._identity.trusted]
        return any(_has_signed(ca, crl) for crl in listing for ca in issuers if ca.subject == crl.issuer)

    def expiries(self) -> Iterator[tuple[str, datetime, str]]:
        """What of this node's own files ends: its name, when, and what happens then and how that is avoided."""
        cert, crls = self._identity.cert_pem, self._identity.crls_pem
        for certificate in self._identity.chain:
            what = f"cert_pem {cert}: {_named(certificate)}"
            yield what, certificate.not_valid_after_utc, "then peers refuse this node: have it renewed for the same key"
        for crl in self._identity.revocations:
            if crl.next_update_utc is not None:
                what = f"crls_pem {crls}: the list of {common_name(crl.issuer)!r}"
                yield what, crl.next_update_utc, "then every new connection is refused: have the list renewed"


class ExpiryWarnings:
    """Tells early, and again as the end comes nearer, what of a node's own files runs out."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, datetime], int] = {}

    def log_due(self, trust: CertificateVerifier, now: float) -> None:
        """Log each end once a stage of `WARN_AT` is reached that was not told yet."""
        for what, end, remedy in trust.expiries():
            left = end.timestamp() - now
            stage = sum(left <= limit for limit in WARN_AT)
            if stage <= self._told.get((what, end), 0):
                continue
            self._told[(what, end)] = stage
            if left <= 0:
                _log.error("%s has expired on %s: %s", what, _time(end), remedy.removeprefix("then "))
            else:
                _log.warning("%s ends on %s: %s", what, _time(end), remedy)


def _has_signed(ca: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    try:
        return crl.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):  # a key that signs nothing
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
