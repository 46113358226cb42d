"""Certificates of a running node: read again when their files change, and compared with every live connection.

Before it: `security`, which verifies a chain once, in the handshake. Its contexts cannot be changed, so fresh ones are
made and handed over for the handshakes to come; what is connected already is judged here, at every round, by the lists
and the clock of that moment. Files that cannot be used change nothing: the log names the remedy, and the old stay.
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

from hypha_net._libp2p.security.tls import TlsContexts
from hypha_net.certificate_validation import CertificateVerifier, Chain, ExpiryWarnings, Rejection
from hypha_net.errors import IdentityError
from hypha_net.events import Events, PeerRejected
from hypha_net.identity import FileState, Identity, file_state, reload_identity
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.certificates")

CLOSE_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class LiveConnection:
    """A connection as the watch sees it."""

    peer: PeerId
    chain: Chain
    close: Callable[[], Coroutine[Any, Any, None]]


class CertificateWatch:
    """Keeps one endpoint's identity and connections up to date."""

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
        self._trust = CertificateVerifier(identity)
        self._warnings = ExpiryWarnings()
        self._own: Rejection | None = None
        self._pending: FileState | None = None
        """A change that has been seen once: it is acted on when the files look the same a round later."""
        self._failed: FileState | None = None
        """Files that could not be used, and are not tried again until they change."""
        self._turn = anyio.Lock()

    async def run(self, interval: float) -> None:
        """Look at the files, the clock and the connections every `interval` seconds until cancelled."""
        self._judge_own()
        while True:
            await anyio.sleep(interval)
            await self._look_at_files()
            self._judge_own()
            await self.check()

    async def _look_at_files(self) -> None:
        state = await anyio.to_thread.run_sync(file_state, self._identity)
        if state in (self._identity.read_from, self._failed):
            self._pending = None
        elif state == self._pending:
            await self.reload()
        else:
            self._pending = state

    async def reload(self) -> bool:
        """Read the files again and drop who is not trusted any more; false if the old have to stay, as the log says."""
        async with self._turn:
            before = await anyio.to_thread.run_sync(file_state, self._identity)
            try:
                fresh, contexts, trust = await anyio.to_thread.run_sync(_read_again, self._identity)
            except _ChangingError:
                _log.info("certificates are being changed right now, and are read again in a moment")
                return False
            except IdentityError as error:
                self._failed = before
                _log.error("certificates are not reloaded, and those from before stay in use: %s", error)
                return False
            self._failed = self._pending = None
            self._identity, self._trust = fresh, trust
            self._adopt(fresh, contexts)
            _log.info("certificates reloaded: %s", fresh.certificate)
        self._judge_own()
        await self.check()
        return True

    def _judge_own(self) -> None:
        now = self._clock()
        self._warnings.log_due(self._trust, now)
        verdict = self._trust.check_own(now)
        if verdict is not None and verdict != self._own:
            _log.error("peers refuse this node: %s; have a new certificate issued for its key", verdict.detail)
        self._own = verdict

    async def check(self) -> None:
        """Close every connection whose chain does not hold any more."""
        now = self._clock()
        judged = [(connection, self._trust.check(connection.chain, now)) for connection in self._connections()]
        bad = [(connection, verdict) for connection, verdict in judged if verdict is not None]
        with anyio.move_on_after(CLOSE_TIMEOUT):
            async with anyio.create_task_group() as tasks:
                for connection, verdict in bad:
                    _log.warning("connection to %s is ended: %s", connection.peer, verdict.detail)
                    self._events.emit(PeerRejected(connection.peer, verdict.reason, verdict.detail))
                    tasks.start_soon(connection.close)


class _ChangingError(IdentityError):
    """The files changed while they were read."""


def _read_again(identity: Identity) -> tuple[Identity, TlsContexts, CertificateVerifier]:
    """A fresh identity with what is made of it, all of one state of the files. Raises `IdentityError`."""
    try:
        fresh = reload_identity(identity)
        contexts, trust = TlsContexts(fresh), CertificateVerifier(fresh)
        list(trust.expiries())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # of fields that are parsed when they are needed
        raise IdentityError(f"a certificate or list makes no sense: {error}") from error
    if file_state(fresh) != fresh.read_from:
        raise _ChangingError("the files changed while they were read")
    return fresh, contexts, trust
