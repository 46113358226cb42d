"""SSL contexts of an identity, for both directions.

Read by `security.tls` for each handshake; made anew by `security.certificate_monitor` when the identity's files change,
since an `SSLContext` cannot forget a certificate.
"""

from __future__ import annotations

from hypha_net._libp2p.security.peer_certificates import record_peer_certificates
from hypha_net.identity import Identity


class TlsContexts:
    """Contexts made from an identity's files, keyed by whether this side is the server. Never changed once made."""

    def __init__(self, identity: Identity) -> None:
        """Make the contexts. Raises `IdentityError` when OpenSSL rejects the files."""
        self.plain = {True: identity.server_context(), False: identity.client_context()}
        """For established connections."""
        self.recording = {True: identity.server_context(), False: identity.client_context()}
        """For handshakes: these keep the certificate that a peer shows, also one that does not verify."""
        for context in self.recording.values():
            record_peer_certificates(context)
