"""What Python's `ssl` keeps back: the certificate of a handshake that failed, and the chain of one that did not.

OpenSSL forgets a client's certificate that does not verify, and Python has no verify callback. Its private hook for
handshake messages sees it, so that a refusal can say whose it was; where that is missing it names the address alone.
The verified chain, which later revocations are compared with, is public from Python 3.13 on.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

_CERTIFICATE: Final = 11
_HANDSHAKE: Final = 22
_DER: Final = 2
"""`_ssl.ENCODING_DER`."""


def watch(context: ssl.SSLContext) -> None:
    """Keep what peers show in handshakes of this context."""
    vars_of: Any = context
    vars_of._msg_callback = _keep


def _keep(tls: Any, direction: str, _version: object, content: int, message: int, data: bytes) -> None:
    if tls is not None and direction == "read" and content == _HANDSHAKE and message == _CERTIFICATE:
        tls.shown_certificate = data


def shown(tls: ssl.SSLObject) -> bytes | None:
    """The first certificate that the peer showed, verified or not, as it came: it should be DER."""
    data: bytes | None = getattr(tls, "shown_certificate", None)
    if data is None:
        return None
    # RFC 8446 4.4.2: header (4), context behind its length (1), length of the list (3), length of the first (3)
    start = 5 + data[4] + 3 if len(data) > 4 else 0
    size = int.from_bytes(data[start : start + 3], "big")
    return data[start + 3 : start + 3 + size]


def verified_chain(tls: ssl.SSLObject) -> list[bytes]:
    """The peer's chain as it was verified, its own certificate first, each as DER."""
    if hasattr(tls, "get_verified_chain"):
        return list(tls.get_verified_chain())
    inner: Any = tls
    return [certificate.public_bytes(_DER) for certificate in inner._sslobj.get_verified_chain()]
