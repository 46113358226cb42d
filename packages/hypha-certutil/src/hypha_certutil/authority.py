"""Certificates, signing requests and revocation lists of a Hypha network, as values: no files and no clock.

The hierarchy is root CA → organisation CA → node, in X.509 (RFC 5280) with Ed25519 keys (RFC 8410). A node's peer id is
derived from its certificate's key (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md). Callers pass
keys and time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address
from typing import Final, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hypha_certutil.errors import CertutilError

ROLES: Final = ("gateway", "scheduler", "worker", "data")
ROLE_PREFIX: Final = "hypha://role/"
SKEW: Final = timedelta(minutes=5)
"""How far validity starts in the past, for nodes whose clock is behind the authority's."""

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# identity multihash of the libp2p public key message: key type 1 (Ed25519), 32 bytes of key
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")

_Built = TypeVar("_Built", x509.CertificateBuilder, x509.CertificateSigningRequestBuilder)


@dataclass(frozen=True, slots=True)
class Authority:
    """CA with its key, its certificate and the CAs above it."""

    key: Ed25519PrivateKey
    certificate: x509.Certificate
    above: tuple[x509.Certificate, ...] = ()
    """The issuing CAs, nearest first, up to and including the root; empty for a root."""

    @property
    def trust(self) -> tuple[x509.Certificate, ...]:
        """Trust bundle for certificates that this CA issues: itself, then the CAs above it."""
        return (self.certificate, *self.above)

    @property
    def intermediates(self) -> tuple[x509.Certificate, ...]:
        """Intermediate CAs that a node sends after its own certificate: all but the root."""
        return self.trust[:-1]


def check_name(name: str) -> str:
    """Return `name` if it is valid as a common name, a DNS name and part of a file name.

    Raises:
        CertutilError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise CertutilError(f"name {name!r}: use 1 to 63 letters, digits, '.' and '-', a letter or digit at each end")
    return name


def peer_id(key: Ed25519PublicKey) -> str:
    """Return the libp2p peer id of a node with this public key, in base58 (``12D3KooW…``)."""
    raw = _PEER_ID_PREFIX + key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    number = int.from_bytes(raw, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" + digits  # the one leading zero byte


def ed25519_key(holder: x509.Certificate | x509.CertificateSigningRequest, what: str) -> Ed25519PublicKey:
    """Return the public key of a certificate or request.

    Raises:
        CertutilError: it is not an Ed25519 key, the only kind that Hypha uses.
    """
    key = holder.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise CertutilError(f"{what}: its key is {type(key).__name__}; Hypha nodes use Ed25519 keys only")
    return key


def make_root(name: str, key: Ed25519PrivateKey, *, days: int, now: datetime) -> Authority:
    """Create a self-signed root CA, which may issue organisation CAs."""
    return Authority(key, _make_ca(name, key, None, days=days, now=now))


def make_org(name: str, key: Ed25519PrivateKey, root: Authority, *, days: int, now: datetime) -> Authority:
    """Create an organisation's CA under `root`, which may issue node certificates.

    Raises:
        CertutilError: it would outlive the root or has its name, or `root` is not a root CA.
    """
    if root.above:
        raise CertutilError(f"{common_name(root.certificate)!r} is not a root: organisations are signed by a root")
    _check_validity(root, days, now)
    if _subject(name) == root.certificate.subject:
        raise CertutilError(f"organisation {name!r} has the name of its root: choose another")
    return Authority(key, _make_ca(name, key, root, days=days, now=now), root.trust)


def make_node(
    name: str, key: Ed25519PublicKey, org: Authority, *, role: str | None, days: int, now: datetime
) -> x509.Certificate:
    """Create the certificate of a node, for both ends of a TLS connection.

    Raises:
        CertutilError: it would outlive the organisation's CA, or `org` is a root.
    """
    _check_validity(org, days, now)
    if not org.above:
        raise CertutilError(f"{common_name(org.certificate)!r} is a root: nodes are signed by an organisation")
    builder = _begin_certificate(name, days, now).issuer_name(org.certificate.subject).public_key(key)
    builder = _with_subject_alt_names(builder, name, role)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(is_ca=False), critical=True)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return _with_key_identifiers(builder, key, org.key.public_key()).sign(org.key, None)


def renew_node(
    old: x509.Certificate, revoked: x509.CertificateRevocationList, org: Authority, *, days: int, now: datetime
) -> x509.Certificate:
    """Create a certificate for the key, name and role of one that `org` has issued; the old one may have expired.

    Raises:
        CertutilError: `org` did not issue it or has revoked it, or the new one would outlive the organisation's CA.
    """
    _check_issued(org, old)
    name = common_name(old)
    if revoked.get_revoked_certificate_by_serial_number(old.serial_number) is not None:
        raise CertutilError(f"certificate {name!r} has been revoked: create the node again, with another key")
    key = ed25519_key(old, f"certificate {name!r}")
    return make_node(check_name(name), key, org, role=role_of(old), days=days, now=now)


def make_request(name: str, key: Ed25519PrivateKey, role: str | None) -> x509.CertificateSigningRequest:
    """Create a certificate signing request (RFC 2986), which leaves the node's machine instead of its key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    return _with_subject_alt_names(builder, name, role).sign(key, None)


@dataclass(frozen=True, slots=True)
class Requested:
    """Checked content of a signing request."""

    name: str
    role: str | None
    key: Ed25519PublicKey


def read_request(request: x509.CertificateSigningRequest) -> Requested:
    """Check a request: it is signed with its own key, and its name is valid.

    Raises:
        CertutilError: its signature, name, role or kind of key is not acceptable.
    """
    key = ed25519_key(request, "request")
    if not request.is_signature_valid:
        raise CertutilError("request: its signature does not match its key; create it again")
    names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise CertutilError(f"request: it has {len(names)} common names where one is needed")
    return Requested(check_name(str(names[0].value)), role_of(request), key)


def role_of(holder: x509.Certificate | x509.CertificateSigningRequest) -> str | None:
    """Return the role that a certificate or request names, or None.

    Raises:
        CertutilError: the role is not one of `ROLES`, or there are several.
    """
    try:
        names = holder.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    roles = [uri.removeprefix(ROLE_PREFIX) for uri in uris if uri.startswith(ROLE_PREFIX)]
    if len(roles) > 1 or any(role not in ROLES for role in roles):
        raise CertutilError(f"role {', '.join(roles)!r} is not one of {', '.join(ROLES)}")
    return roles[0] if roles else None


def make_crl(
    authority: Authority,
    revoked: Sequence[x509.RevokedCertificate],
    *,
    number: int,
    days: int,
    now: datetime,
) -> x509.CertificateRevocationList:
    """Create the list of certificates that `authority` has revoked; `number` increases with every list.

    Raises:
        CertutilError: `days` is not positive.
    """
    if days < 1:
        raise CertutilError(f"--days {days}: use 1 or more")
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.certificate.subject)
    builder = builder.last_update(now - SKEW).next_update(now + timedelta(days=days))
    for entry in revoked:
        builder = builder.add_revoked_certificate(entry)
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return builder.add_extension(issuer, critical=False).sign(authority.key, None)


def revoke(
    authority: Authority,
    current: x509.CertificateRevocationList,
    certificates: Sequence[x509.Certificate],
    *,
    days: int,
    now: datetime,
) -> x509.CertificateRevocationList:
    """Create the successor of the list `current`, with `certificates` added, or only renewed without any.

    Raises:
        CertutilError: a certificate was not issued by this authority, or `current` is not its list.
    """
    if not current.is_signature_valid(authority.key.public_key()):
        raise CertutilError(
            "the revocation list is not signed by this authority: give the list and the CA that belong together"
        )
    entries = {entry.serial_number: entry for entry in current}
    for certificate in certificates:
        _check_issued(authority, certificate)
        entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number).revocation_date(now).build()
        entries.setdefault(certificate.serial_number, entry)
    number = current.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number + 1
    return make_crl(authority, list(entries.values()), number=number, days=days, now=now)


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of a certificate, for display."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else "(no name)"


def _check_issued(authority: Authority, certificate: x509.Certificate) -> None:
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (InvalidSignature, ValueError, TypeError):
        raise CertutilError(
            f"certificate {common_name(certificate)!r} was not issued by {common_name(authority.certificate)!r}: "
            "name the CA that did with --ca"
        ) from None


def _check_validity(issuer: Authority, days: int, now: datetime) -> None:
    end = issuer.certificate.not_valid_after_utc
    left = (end - now).days
    if left < 1:
        raise CertutilError(f"{common_name(issuer.certificate)!r} is valid until {end:%Y-%m-%d} only: create it again")
    if days > left:
        raise CertutilError(
            f"--days {days} outlives {common_name(issuer.certificate)!r}, which ends {end:%Y-%m-%d}: use at most {left}"
        )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_name(name))])


def _begin_certificate(name: str, days: int, now: datetime) -> x509.CertificateBuilder:
    if days < 1:
        raise CertutilError(f"--days {days}: use 1 or more")
    try:
        end = now + timedelta(days=days)
    except OverflowError:
        raise CertutilError(f"--days {days}: ends after the year 9999") from None
    builder = x509.CertificateBuilder().subject_name(_subject(name)).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - SKEW).not_valid_after(end)


def _make_ca(
    name: str, key: Ed25519PrivateKey, root: Authority | None, *, days: int, now: datetime
) -> x509.Certificate:
    """Create the certificate of an organisation's CA, or of a root, which signs itself."""
    signer, issuer = (key, _subject(name)) if root is None else (root.key, root.certificate.subject)
    builder = _begin_certificate(name, days, now).issuer_name(issuer).public_key(key.public_key())
    path_length = 1 if root is None else 0
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
    builder = builder.add_extension(_key_usage(is_ca=True), critical=True)
    return _with_key_identifiers(builder, key.public_key(), signer.public_key()).sign(signer, None)


def _with_key_identifiers(
    builder: x509.CertificateBuilder, key: Ed25519PublicKey, issuer: Ed25519PublicKey
) -> x509.CertificateBuilder:
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)


def _with_subject_alt_names(builder: _Built, name: str, role: str | None) -> _Built:
    # Nodes are known by their keys, not by where they run. Where TLS must verify a name, as rustls does, it is 0.0.0.0.
    names: list[x509.GeneralName] = [x509.IPAddress(IPv4Address("0.0.0.0")), x509.DNSName(name)]
    if role is not None:
        names.append(x509.UniformResourceIdentifier(ROLE_PREFIX + role))
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False)


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
