"""Monitor of certificates: reload changed files, and check live connections against current lists and the clock.

`security.tls` verifies a chain once, in the handshake. Here every live connection's chain is checked again at each
interval, with `certificate_validation`. When the identity's files change, fresh contexts are made and passed to the
endpoint for handshakes to come. Files that cannot be used change nothing: the log names the remedy, and the previous
certificates stay in use.

Run by the endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.to_thread
from cryptography.exceptions import UnsupportedAlgorithm

from hypha_net._libp2p.security.contexts import TlsContexts
from hypha_net.certificate_validation import CertificateRejection, CertificateVerifier, Chain, ExpiryWarnings
from hypha_net.errors import IdentityError
from hypha_net.events import Events, PeerRejected
from hypha_net.identity import FileState, Identity, file_state, reload_identity
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.certificates")

CLOSE_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class LiveConnection:
    """A connection to check: whose it is, its chain, and how to close it."""

    peer: PeerId
    chain: Chain
    close: Callable[[], Coroutine[Any, Any, None]]


class CertificateMonitor:
    """Keeps the identity of one endpoint current, and closes connections whose certificates are no longer valid."""

    def __init__(
        self,
        identity: Identity,
        connections: Callable[[], Iterable[LiveConnection]],
        adopt: Callable[[Identity, TlsContexts], None],
        events: Events,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._connections = connections
        self._adopt = adopt
        self._events = events
        self._clock = clock
        self._verifier = CertificateVerifier(identity)
        self._warnings = ExpiryWarnings()
        self._own_rejection: CertificateRejection | None = None
        self._pending: FileState | None = None
        """A change seen once; the files are reloaded when they look the same an interval later."""
        self._failed: FileState | None = None
        """Files that could not be used; they are not tried again until they change."""
        self._reloading = anyio.Lock()

    async def run(self, interval: float) -> None:
        """Check files, own certificate and connections every `interval` seconds until cancelled."""
        self._check_own()
        while True:
            await anyio.sleep(interval)
            await self._reload_if_changed()
            self._check_own()
            await self.check()

    async def _reload_if_changed(self) -> None:
        state = await anyio.to_thread.run_sync(file_state, self._identity)
        if state in (self._identity.read_from, self._failed):
            self._pending = None
        elif state == self._pending:
            await self.reload()
        else:
            self._pending = state

    async def reload(self) -> bool:
        """Reload the files and close connections that are no longer trusted.

        Return False if the files cannot be used; the log says why, and the previous certificates stay in use.
        """
        async with self._reloading:
            before = await anyio.to_thread.run_sync(file_state, self._identity)
            try:
                fresh, contexts, verifier = await anyio.to_thread.run_sync(_read_files, self._identity)
            except _ChangingError:
                _log.info("certificate files are being changed; reading them again in a moment")
                return False
            except IdentityError as error:
                self._failed = before
                _log.error("certificates are not reloaded, the previous ones stay in use: %s", error)
                return False
            self._failed = self._pending = None
            self._identity, self._verifier = fresh, verifier
            self._adopt(fresh, contexts)
            _log.info("certificates reloaded: %s", fresh.certificate)
        self._check_own()
        await self.check()
        return True

    def _check_own(self) -> None:
        """Log the coming end of own files, and an own certificate that peers refuse."""
        now = self._clock()
        self._warnings.log_due(self._verifier, now)
        rejection = self._verifier.check_own(now)
        if rejection is not None and rejection != self._own_rejection:
            _log.error("peers refuse this node: %s; have a new certificate issued for its key", rejection.detail)
        self._own_rejection = rejection

    async def check(self) -> None:
        """Close every connection whose chain is no longer valid."""
        now = self._clock()
        checked = [(connection, self._verifier.check(connection.chain, now)) for connection in self._connections()]
        rejected = [(connection, rejection) for connection, rejection in checked if rejection is not None]
        with anyio.move_on_after(CLOSE_TIMEOUT):
            async with anyio.create_task_group() as tasks:
                for connection, rejection in rejected:
                    _log.warning("closing the connection to %s: %s", connection.peer, rejection.detail)
                    self._events.emit(PeerRejected(connection.peer, rejection.reason, rejection.detail))
                    tasks.start_soon(connection.close)


class _ChangingError(IdentityError):
    """The files changed while they were read."""


def _read_files(identity: Identity) -> tuple[Identity, TlsContexts, CertificateVerifier]:
    """Read the files again and make contexts and verifier of one state of them. Raises `IdentityError`."""
    try:
        fresh = reload_identity(identity)
        contexts, verifier = TlsContexts(fresh), CertificateVerifier(fresh)
        list(verifier.expiries())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # of fields that are parsed only when used
        raise IdentityError(f"a certificate or revocation list is malformed: {error}") from error
    if file_state(fresh) != fresh.read_from:
        raise _ChangingError("the files changed while they were read")
    return fresh, contexts, verifier
