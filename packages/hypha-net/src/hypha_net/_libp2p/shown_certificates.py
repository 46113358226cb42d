"""The certificate that a peer showed in a handshake that failed, so that a refusal can say whose it was.

OpenSSL forgets a client's certificate that does not verify, and Python has no verify callback. Its private hook for
handshake messages sees it; where that is missing a refusal names the address alone.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

from cryptography import x509

_CERTIFICATE: Final = 11
_HANDSHAKE: Final = 22


def watch(context: ssl.SSLContext) -> None:
    """Keep what peers show in handshakes of this context."""
    vars_of: Any = context
    vars_of._msg_callback = _keep


def _keep(tls: Any, direction: str, _version: object, content: int, message: int, data: bytes) -> None:
    if tls is not None and direction == "read" and content == _HANDSHAKE and message == _CERTIFICATE:
        tls.shown_certificate = data


def shown(tls: ssl.SSLObject) -> x509.Certificate | None:
    """The first certificate that the peer showed, verified or not.

    Raises:
        ValueError: what it showed is no certificate.
    """
    data: bytes | None = getattr(tls, "shown_certificate", None)
    if data is None:
        return None
    # RFC 8446 4.4.2: header (4), context behind its length (1), length of the list (3), length of the first (3)
    start = 5 + data[4] + 3 if len(data) > 4 else 0
    size = int.from_bytes(data[start : start + 3], "big")
    return x509.load_der_x509_certificate(data[start + 3 : start + 3 + size])
