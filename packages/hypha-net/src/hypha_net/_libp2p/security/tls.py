"""``/tls/1.0.0`` as Hypha nodes speak it: TLS 1.3 with CA-signed certificates on both sides.

`SSLObject` works on memory buffers, the socket is read in large pieces straight from trio: the stock transport reads
4 KiB at a time, and carries on after a certificate that did not verify.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

import trio
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from multiaddr import Multiaddr

from hypha_net._libp2p.relay.circuit import CircuitConnection
from hypha_net._libp2p.security.peer_certificates import shown, verified_chain, watch
from hypha_net._libp2p.security.tls_errors import RefusalReason, explain, is_refusal
from hypha_net._libp2p.yamux.receive_buffer import release_buffer
from hypha_net.certificate_validation import Chain, parse_chain
from hypha_net.errors import IdentityError, RefusedError
from hypha_net.events import Events, PeerRejected
from hypha_net.identity import CertificateInfo, Identity, read_certificate
from hypha_net.log_throttle import LogThrottle
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.security")

TLS_PROTOCOL: Final = TProtocol("/tls/1.0.0")
HANDSHAKE_TIMEOUT: Final = 10.0
SEND_TIMEOUT: Final = 60.0
"""Seconds for one encrypted frame to leave; a peer that takes nothing for so long loses its connection."""
_PIECE: Final = 256 << 10


@dataclass(slots=True)
class ByteCount:
    """Bytes on the wire of all connections of one endpoint."""

    sent: int = 0
    received: int = 0


class TlsContexts:
    """An identity's contexts, which cannot be changed: when its files change they are made anew and swapped."""

    def __init__(self, identity: Identity) -> None:
        """Raises `IdentityError` when TLS does not take the files."""
        self.plain = {True: identity.server_context(), False: identity.client_context()}
        self.watched = {True: identity.server_context(), False: identity.client_context()}
        for context in self.watched.values():
            watch(context)


@dataclass(slots=True)
class SecurityRecords:
    """What the security layer shares with the engine."""

    contexts: TlsContexts
    """For handshakes that begin from now on."""
    events: Events
    bytes: ByteCount = field(default_factory=ByteCount)


def libp2p_key_pair(identity: Identity) -> KeyPair:
    """The identity's key as py-libp2p holds keys."""
    return create_new_key_pair(identity.seed)


class _Scratch(threading.local):
    """Where ciphertext is between the socket and OpenSSL: never over an await, so one for all connections does."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_PIECE))


_scratch: Final = _Scratch()


class TlsConnection(ISecureConn):
    """An encrypted, authenticated connection; what the muxer reads and writes."""

    def __init__(self, raw: IRawConnection, tls: ssl.SSLObject, bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO]) -> None:
        self._raw = raw
        self._socket: trio.SocketStream | None = getattr(getattr(raw, "stream", None), "stream", None)
        self._tls = tls
        self._incoming, self._outgoing = bios
        self._send_lock = trio.Lock()
        self._receive_lock = trio.Lock()
        self._bytes = ByteCount()
        self._peer: PeerId | None = None
        self._local: tuple[ID, PrivateKey] | None = None
        self.certificate: CertificateInfo | None = None
        self.chain: Chain = ()
        """The peer's certificate and the CAs above it, as they were verified."""
        self.refusal: str | None = None
        """Why the other side refused this side, once it has said so."""
        self.refused_for: RefusalReason | None = None
        """Why this side refused the other, once it has."""
        self.is_initiator = not tls.server_side

    def attach(self, records: SecurityRecords, local: ID, key: PrivateKey) -> None:
        """Count into the endpoint's records, and know the local identity."""
        self._bytes = records.bytes
        self._local = (local, key)

    # ----------------------------------------------------------------------------------------------- handshake

    async def handshake(self) -> CertificateInfo:
        """Run the TLS handshake and read the peer's certificate.

        Raises:
            RefusedError: one side does not accept the other's certificate.
            ConnectionClosedError: the connection broke off.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self.more()
            except ssl.SSLEOFError as error:  # no refusal: it may be about to end, or to start
                raise ConnectionClosedError("the peer closed the connection during the TLS handshake") from error
            except ssl.SSLError as error:
                await self._flush_quietly()
                raise RefusedError(self._explain(error)) from error
        await self._flush()
        data = self._tls.getpeercert(binary_form=True)
        if data is None:
            self.refused_for = "protocol"
            raise RefusedError("the peer showed no certificate")
        try:
            self.certificate = read_certificate(data, "the peer's certificate")
            self.chain = parse_chain(verified_chain(self._tls))
        except (IdentityError, ValueError) as error:
            self.refused_for = "untrusted"
            raise RefusedError(str(error)) from error
        self._peer = self.certificate.peer_id
        return self.certificate

    def _explain(self, error: ssl.SSLError) -> str:
        """Who refused whose certificate, and why; notes that this side did, if it did."""
        words, self.refused_for = explain(error, shown(self._tls))
        return words

    def shown_peer(self) -> PeerId | None:
        """Who the peer said it was, for one that was refused; nobody has verified that."""
        certificate = shown(self._tls)
        try:
            return None if certificate is None else read_certificate(certificate).peer_id
        except IdentityError:
            return None

    # ------------------------------------------------------------------------------------------------- data

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` decrypted bytes; empty after the peer's clean end."""
        buffer = bytearray(n if n is not None and n > 0 else _PIECE)
        async with self._receive_lock:
            return bytes(buffer[: await self.read_into(memoryview(buffer))])

    async def read_into(self, buffer: memoryview) -> int:
        """Wait for at least one decrypted byte and fill as much of `buffer` as is there; 0 after the peer's clean end.

        One task at a time.
        """
        while (count := self.read_now(buffer)) is None:
            await self.more()
        return count

    def read_now(self, buffer: memoryview) -> int | None:
        """Fill as much of `buffer` as can be decrypted, a record of 16 KiB after the other; none if `more` must come.

        0 after the peer's clean end. Raises `ConnectionClosedError` after any other.
        """
        size = 0
        while size < len(buffer):
            try:
                count: int = self._tls.read(len(buffer) - size, buffer[size:])  # type: ignore[assignment]
            except ssl.SSLError as error:  # the next call meets it again
                if size:
                    break
                if isinstance(error, ssl.SSLWantReadError):
                    return None
                if isinstance(error, ssl.SSLZeroReturnError):
                    return 0
                if is_refusal(error):
                    self.refusal = self._explain(error)
                raise ConnectionClosedError(self.refusal or f"TLS: {error}") from error
            if not count:
                break
            size += count
        return size

    async def write(self, data: bytes, body: memoryview | None = None) -> None:
        """Send `data` and `body`. A cancellation waits until they are out: half a frame would end the connection."""
        try:
            self._send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            try:
                self._tls.write(data)
                if body is not None:
                    self._tls.write(body)
            except ssl.SSLError as error:
                raise ConnectionClosedError(f"TLS: {error}") from error
            await self._send_whole(self._outgoing.read())
        finally:
            self._send_lock.release()

    async def _send_whole(self, data: bytes) -> None:
        rest = memoryview(data) if self._socket is None else self._send_now(memoryview(data))
        if not rest:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_TIMEOUT) as scope:
            await self._send(rest)
        if scope.cancelled_caught:
            await self.close()
            raise ConnectionClosedError(f"the peer took nothing for {SEND_TIMEOUT:g} s")

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._send(self._outgoing.read())

    async def _flush_quietly(self) -> None:
        """Send the alert that tells the peer why, if it still listens."""
        try:
            await self._flush()
        except ConnectionClosedError:
            _log.debug("the peer was gone before it could be told why")

    async def more(self) -> None:
        """Move ciphertext from the wire to TLS; waits for some."""
        if isinstance(self._raw, CircuitConnection):  # its bytes are counted by the connection that carries it
            part = await self._raw.read_part()
            self._feed(part)
            release_buffer(part)
            return
        assert self._socket is not None
        waited = False
        while not self._receive_now(self._socket.socket):
            try:
                await trio.lowlevel.wait_readable(self._socket.socket.fileno())
            except (OSError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"the connection broke off: {error}") from error
            waited = True
        if not waited:  # others have their turn; what has come is in TLS already, so a cancellation loses nothing
            await trio.lowlevel.checkpoint()

    def _receive_now(self, socket: trio.socket.SocketType) -> bool:
        """Move what the socket has to TLS; false if it has nothing now."""
        try:
            count = os.readv(socket.fileno(), (_scratch.buffer,))
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionClosedError(f"the connection broke off: {error}") from error
        self._bytes.received += count
        self._feed(_scratch.buffer[:count])
        return True

    def _feed(self, data: memoryview) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _send(self, data: bytes | memoryview) -> None:
        if self._socket is None:
            await self._raw.write(cast(bytes, data))
            return
        rest = self._send_now(memoryview(data))
        while rest:
            try:
                await trio.lowlevel.wait_writable(self._socket.socket.fileno())
            except (OSError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"the connection broke off: {error}") from error
            rest = self._send_now(rest)

    def _send_now(self, data: memoryview) -> memoryview:
        """Send what the socket takes at once; the rest."""
        assert self._socket is not None
        try:
            count = os.write(self._socket.socket.fileno(), data)
        except BlockingIOError:
            return data
        except OSError as error:
            raise ConnectionClosedError(f"the connection broke off: {error}") from error
        self._bytes.sent += count
        return data[count:]

    async def close(self) -> None:
        """Say goodbye if that needs no waiting, and close the connection."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 0.5):
            if self._socket is not None and not self._send_lock.locked():
                # the other side's goodbye is not waited for, and there is none to say before the handshake's end
                with suppress(ssl.SSLError, ValueError):
                    self._tls.unwrap()
                await self._flush_quietly()
        if self._socket is None:
            await self._raw.close()
        else:
            await trio.aclose_forcefully(self._socket)

    # --------------------------------------------------------------------------------------------- properties

    def get_local_peer(self) -> ID:
        """The local peer id, as py-libp2p holds it."""
        assert self._local is not None
        return self._local[0]

    def get_local_private_key(self) -> PrivateKey:
        """The local key, as py-libp2p holds it."""
        assert self._local is not None
        return self._local[1]

    def get_remote_peer(self) -> ID:
        """The authenticated peer's id."""
        assert self._peer is not None
        return ID(self._peer.raw)

    def get_remote_public_key(self) -> PublicKey:
        """The authenticated peer's key."""
        assert self._peer is not None
        return Ed25519PublicKey.from_bytes(self._peer.public_key)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the other end, if there is one."""
        address: tuple[str, int] | None = self._raw.get_remote_address()
        return address

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Addresses of the connection itself."""
        return list(self._raw.get_transport_addresses())

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self._raw.get_connection_type()


class TlsTransport(ISecureTransport):
    """Upgrades raw connections; logs refusals with what was refused, the same one once a minute."""

    def __init__(self, identity: Identity, records: SecurityRecords) -> None:
        self._records = records
        self._refusals = LogThrottle()
        self._keys = libp2p_key_pair(identity)
        self._local = ID.from_pubkey(self._keys.public_key)

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Accept a peer."""
        return await self._secure(conn, server=True)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Dial a peer; whether it is the one that was meant is the dialler's to check."""
        return await self._secure(conn, server=False)

    async def _secure(self, conn: IRawConnection, *, server: bool) -> TlsConnection:
        bios = (ssl.MemoryBIO(), ssl.MemoryBIO())
        contexts = self._records.contexts
        tls = contexts.watched[server].wrap_bio(*bios, server_side=server)
        secured = TlsConnection(conn, tls, bios)
        secured.attach(self._records, self._local, self._keys.private_key)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                await secured.handshake()
        except RefusedError as error:
            if secured.refused_for is not None:
                self._records.events.emit(PeerRejected(secured.shown_peer(), secured.refused_for, str(error)))
            self._tell_refusal(conn, secured, str(error), "from" if server else "to")
            raise HandshakeFailure(str(error)) from error
        except trio.TooSlowError as error:
            raise ConnectionClosedError(f"no TLS handshake within {HANDSHAKE_TIMEOUT:g} s") from error
        tls.context = contexts.plain[server]  # watching costs a call for every record, and there is nothing more to see
        return secured

    def _tell_refusal(self, conn: IRawConnection, secured: TlsConnection, error: str, way: str) -> None:
        address = conn.get_remote_address()
        host = address[0] if address and not secured.is_initiator else address  # callers' ports change
        untold = self._refusals.suppressed_count((way, secured.shown_peer() or host, error))
        if untold is not None:
            more = f" (and {untold} times more since it was last told)" if untold else ""
            _log.warning("connection %s %s refused: %s%s", way, shown_address(conn), error, more)


def shown_address(conn: Any) -> str:
    """Where a raw connection comes from or leads to, for people."""
    address = conn.get_remote_address()
    return f"{address[0]}:{address[1]}" if address else "a relayed peer"
