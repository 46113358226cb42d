"""Which certificates still hold: a chain that was verified once, judged anew by lists, trust bundle and clock.

OpenSSL verifies a peer's chain in the handshake and never again. `Trust` is what a node's files say now; the watch in
`hypha_net._libp2p.certificate_watch` asks it about every live connection, and about this node's own certificate.
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

Chain = tuple[x509.Certificate, ...]
"""A verified chain, the node's certificate first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a chain does not hold any more."""

    reason: Literal["revoked", "expired", "untrusted"]
    detail: str


def read_chain(encoded: Iterable[bytes]) -> Chain:
    """The chain in certificates as TLS gives them. Raises `ValueError` for what is none."""
    chain = tuple(x509.load_der_x509_certificate(der) for der in encoded)
    for certificate in chain:  # parsed late otherwise, and what does not parse would be met by the watch
        _ = certificate.subject, certificate.issuer, certificate.not_valid_after_utc
    return chain


class Trust:
    """What an identity's files say about chains."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._anchors = {_anchor(certificate) for certificate in identity.trusted}
        self._lists: dict[bytes, list[x509.CertificateRevocationList]] = {}
        for crl in identity.revocations:
            self._lists.setdefault(crl.issuer.public_bytes(), []).append(crl)
        self._genuine: dict[tuple[int, bytes], bool] = {}

    def verdict(self, chain: Chain, now: float) -> Verdict | None:
        """What is wrong with a chain at a time (seconds since the epoch); none if nothing is."""
        for certificate, above in zip(chain, (*chain[1:], None), strict=True):
            ended = certificate.not_valid_after_utc
            if now > ended.timestamp():
                return Verdict("expired", f"{_named(certificate)} expired on {_time(ended)}")
            if self._is_revoked(certificate, above):
                return Verdict(
                    "revoked", f"{_named(certificate)} is in the list of {common_name(certificate.issuer)!r}"
                )
        if not self._is_anchored(chain):
            return Verdict("untrusted", f"trust_pem holds no CA of {_named(chain[0])} any more")
        return None

    def own_verdict(self, now: float) -> Verdict | None:
        """What is wrong with this node's own chain, which its peers judge alike."""
        return self.verdict(self._identity.chain, now)

    def _is_anchored(self, chain: Chain) -> bool:
        """Whether the bundle vouches for a chain: for its end, or for any part where bundles end below the root."""
        ends = chain[-1:] if self._identity.trust_has_root else chain
        if any(_anchor(certificate) in self._anchors for certificate in ends):
            return True
        return any(_issued(chain[-1], ca) for ca in self._identity.trusted)

    def _is_revoked(self, certificate: x509.Certificate, above: x509.Certificate | None) -> bool:
        lists = self._lists.get(certificate.issuer.public_bytes())
        if not lists:
            return False
        serial = certificate.serial_number
        listing = [crl for crl in lists if crl.get_revoked_certificate_by_serial_number(serial) is not None]
        issuers = [ca for ca in self._identity.trusted if ca.subject == certificate.issuer]
        return any(self._signed_by(crl, ca) for crl in listing for ca in ([above] if above else []) + issuers)

    def _signed_by(self, crl: x509.CertificateRevocationList, ca: x509.Certificate) -> bool:
        """Whether the list is the CA's: a name alone says nothing."""
        key = (id(crl), ca.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
        if key not in self._genuine:
            self._genuine[key] = _verifies(crl, ca)
        return self._genuine[key]

    def ends(self) -> Iterator[tuple[str, datetime, str]]:
        """What of this node's own files ends: its name, when, and what happens then and how that is avoided."""
        cert, crls = self._identity.cert_pem, self._identity.crls_pem
        for certificate in self._identity.chain:
            what = f"cert_pem {cert}: {_named(certificate)}"
            yield what, certificate.not_valid_after_utc, "then peers refuse this node: have it renewed for the same key"
        for crl in self._identity.revocations:
            if crl.next_update_utc is not None:
                what = f"crls_pem {crls}: the list of {common_name(crl.issuer)!r}"
                yield what, crl.next_update_utc, "then every new connection is refused: have the list renewed"


class EndWarnings:
    """Tells early, and again as the end comes nearer, what of a node's own files runs out."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, datetime], int] = {}

    def tell(self, trust: Trust, now: float) -> None:
        """Log each end once a stage of `WARN_AT` is reached that was not told yet."""
        for what, end, remedy in trust.ends():
            left = end.timestamp() - now
            stage = sum(left <= limit for limit in WARN_AT)
            if stage <= self._told.get((what, end), 0):
                continue
            self._told[(what, end)] = stage
            if left <= 0:
                _log.error("%s has expired on %s: %s", what, _time(end), remedy.removeprefix("then "))
            else:
                _log.warning("%s ends on %s: %s", what, _time(end), remedy)


def _verifies(crl: x509.CertificateRevocationList, ca: x509.Certificate) -> bool:
    try:
        return crl.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):  # a key that signs nothing
        return False


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (TypeError, ValueError, InvalidSignature):
        return False
    return True


def _anchor(certificate: x509.Certificate) -> tuple[bytes, bytes]:
    """What makes a CA the same one although its certificate was renewed."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return certificate.subject.public_bytes(), key


def _named(certificate: x509.Certificate) -> str:
    return f"certificate {common_name(certificate.subject)!r} (serial {certificate.serial_number:x})"


def _time(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
