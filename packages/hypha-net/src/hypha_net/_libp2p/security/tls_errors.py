"""Explanations of failed TLS handshakes for operators: which certificate was refused, why, and the remedy.

Alerts: RFC 8446 section 6.2; verification errors: OpenSSL's ``X509_V_ERR`` codes.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final, Literal

from hypha_net.errors import IdentityError
from hypha_net.identity import read_certificate

_COMPARE: Final = "compare trust_pem of both nodes"
_ALERTS: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": f"it does not trust the CA that issued ours: {_COMPARE}; or its crls_pem lacks a list",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "ours is revoked: ask the organisation for a new one",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "ours has expired: have it renewed, and check the clocks; or its lists have",
    "SSLV3_ALERT_BAD_CERTIFICATE": "ours is not valid yet, or damaged: check the clocks of both nodes",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it could not check ours (a missing or expired CRL?)",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "ours is of a kind it does not take",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate",
}
"""Meaning of the peer's alert about this side's certificate."""
_REMEDIES: Final = {
    3: "crls_pem lacks a list of one of the CAs in its chain",
    9: "check the clocks of both nodes",
    10: "its owner has to have it renewed; check the clocks of both nodes",
    12: "crls_pem has to be renewed",
    23: "its owner has to ask the organisation for a new one",
    18: _COMPARE,
    19: _COMPARE,
    20: _COMPARE,
    21: _COMPARE,
}
"""Remedies for OpenSSL's verification errors, by code."""

RefusalReason = Literal["revoked", "expired", "untrusted", "protocol"]
_REASONS: Final[Mapping[int, RefusalReason]] = {10: "expired", 23: "revoked"}


def is_refusal(error: ssl.SSLError) -> bool:
    """Return whether the error is the peer's alert that it does not accept this side's certificate."""
    return error.reason in _ALERTS


def explain(error: ssl.SSLError, shown: bytes | None) -> tuple[str, RefusalReason | None]:
    """Describe who refused whose certificate and the remedy; return that, and the reason if this side refused.

    Args:
        shown: the certificate that the peer showed, as DER.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _REMEDIES.get(error.verify_code)
        text = f"{_describe(shown)} is refused here: {error.verify_message}"
        return f"{text}: {remedy}" if remedy else text, _REASONS.get(error.verify_code, "untrusted")
    if is_refusal(error):
        return f"the peer refused this node's certificate: {_ALERTS[str(error.reason)]} ({error.reason})", None
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer showed no certificate: it is no Hypha node, or its cert_pem was not loaded", "protocol"
    return f"TLS handshake failed: {error.reason or error}", None


def _describe(shown: bytes | None) -> str:
    try:
        return "the peer's certificate" if shown is None else str(read_certificate(shown))
    except IdentityError as error:
        return f"the peer's certificate ({error})"
