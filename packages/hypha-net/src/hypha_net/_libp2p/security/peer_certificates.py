"""Peer certificates that Python's `ssl` does not return: of a failed handshake, and the chain of a successful one.

OpenSSL drops a client's certificate that does not verify, and Python has no verify callback. The private hook for
handshake messages sees it, so that a refusal can name its owner; without the hook the refusal names the address alone.
The verified chain, with which later revocations are compared, has a public method from Python 3.13 on.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

_CERTIFICATE: Final = 11
_HANDSHAKE: Final = 22
_DER: Final = 2
"""`_ssl.ENCODING_DER`."""


def record_peer_certificates(context: ssl.SSLContext) -> None:
    """Keep the certificate that a peer shows in each handshake of this context, for `shown_certificate`."""
    untyped: Any = context
    untyped._msg_callback = _record


def _record(tls: Any, direction: str, _version: object, content: int, message: int, data: bytes) -> None:
    if tls is not None and direction == "read" and content == _HANDSHAKE and message == _CERTIFICATE:
        tls.certificate_message = data


def shown_certificate(tls: ssl.SSLObject) -> bytes | None:
    """Return the first certificate that the peer showed, unverified, expected to be DER; None if it showed none."""
    data: bytes | None = getattr(tls, "certificate_message", None)
    if data is None:
        return None
    # RFC 8446 section 4.4.2: header (4), context behind its length (1), length of the list (3), of the first entry (3)
    start = 5 + data[4] + 3 if len(data) > 4 else 0
    size = int.from_bytes(data[start : start + 3], "big")
    return data[start + 3 : start + 3 + size]


def verified_chain(tls: ssl.SSLObject) -> list[bytes]:
    """Return the peer's verified chain as DER, the peer's own certificate first."""
    if hasattr(tls, "get_verified_chain"):
        return list(tls.get_verified_chain())
    untyped: Any = tls
    return [certificate.public_bytes(_DER) for certificate in untyped._sslobj.get_verified_chain()]
