"""``/tls/1.0.0`` as Hypha nodes speak it: TLS 1.3 (RFC 8446) with CA-signed certificates on both sides.

Replaces py-libp2p's TLS transport, which reads 4 KiB at a time and carries on after a certificate that did not verify.
`ssl.SSLObject` works on memory buffers; ciphertext moves between them and the socket in large pieces. Differs from the
libp2p specification (https://github.com/libp2p/specs/blob/master/tls/tls.md) in that a CA signs the certificates.

The resulting `TlsConnection` is the transport of a `yamux.session.YamuxSession`.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
from hypha_net._libp2p.security.contexts import TlsContexts
from hypha_net._libp2p.security.peer_certificates import shown_certificate, verified_chain
from hypha_net._libp2p.security.tls_errors import RefusalReason, explain, is_refusal
from hypha_net.buffer_pool import release_buffer
from hypha_net.certificate_validation import Chain, parse_chain
from hypha_net.errors import IdentityError, RefusedError
from hypha_net.events import Events, PeerRejected
from hypha_net.identity import CertificateInfo, Identity, read_certificate
from hypha_net.log_throttle import LogThrottle
from hypha_net.peer_names import learn_name
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.security")

TLS_PROTOCOL: Final = TProtocol("/tls/1.0.0")
HANDSHAKE_TIMEOUT: Final = 10.0
SEND_TIMEOUT: Final = 60.0
"""Seconds within which one encrypted frame must be sent; then the connection is closed."""
_READ_SIZE: Final = 256 << 10
_WRITE_SIZE: Final = 256 << 10
"""Bytes moved between OpenSSL and the socket at a time: small enough for a processor's cache."""


@dataclass(slots=True)
class ByteCount:
    """Counter of bytes on the wire, over all connections of one endpoint."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class SecurityState:
    """State that the security layer shares with the endpoint."""

    contexts: TlsContexts
    """For handshakes that begin from now on."""
    events: Events
    bytes: ByteCount = field(default_factory=ByteCount)


def libp2p_key_pair(identity: Identity) -> KeyPair:
    """Return the identity's key as py-libp2p's key pair."""
    return create_new_key_pair(identity.seed)


class _Scratch(threading.local):
    """Buffer for ciphertext between the socket and OpenSSL. Shared by all connections: not used across an await."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_READ_SIZE))


_scratch: Final = _Scratch()


class TlsConnection(ISecureConn):
    """An encrypted, authenticated connection; the `SecureTransport` of a yamux session."""

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
        """The peer's certificate and the CAs above it, as verified in the handshake."""
        self.refusal: str | None = None
        """The peer's alert that refuses this side's certificate, explained; None without one."""
        self.refused_for: RefusalReason | None = None
        """Why this side refused the peer's certificate; None if it did not."""
        self.is_initiator = not tls.server_side

    def attach(self, state: SecurityState, local: ID, key: PrivateKey) -> None:
        """Count bytes in the endpoint's state, and set the local identity that py-libp2p asks for."""
        self._bytes = state.bytes
        self._local = (local, key)

    # ----------------------------------------------------------------------------------------------- handshake

    async def handshake(self) -> CertificateInfo:
        """Run the TLS handshake and return the peer's certificate.

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
                await self.wait_readable()
            except ssl.SSLEOFError as error:  # not a refusal: the peer may be stopping or starting
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
        learn_name(self._peer, self.certificate.subject)
        return self.certificate

    def _explain(self, error: ssl.SSLError) -> str:
        """Describe who refused whose certificate, and why; set `refused_for` if this side did."""
        text, self.refused_for = explain(error, shown_certificate(self._tls))
        return text

    def shown_peer(self) -> PeerId | None:
        """Return the unverified peer id in the certificate of a peer that was refused; None without one."""
        certificate = shown_certificate(self._tls)
        try:
            return None if certificate is None else read_certificate(certificate).peer_id
        except IdentityError:
            return None

    # ------------------------------------------------------------------------------------------------- data

    async def read(self, n: int | None = None) -> bytes:
        """Return up to `n` decrypted bytes; empty after the peer's clean end."""
        buffer = bytearray(n if n is not None and n > 0 else _READ_SIZE)
        async with self._receive_lock:
            return bytes(buffer[: await self.read_into(memoryview(buffer))])

    async def read_into(self, buffer: memoryview) -> int:
        """Wait for at least one decrypted byte, fill as much of `buffer` as is there and return how much.

        Return 0 after the peer's clean end. One task at a time.
        """
        while (count := self.read_now(buffer)) is None:
            await self.wait_readable()
        return count

    def read_now(self, buffer: memoryview) -> int | None:
        """Fill as much of `buffer` as can be decrypted, one record of up to 16 KiB after the other.

        Return how much; 0 after the peer's clean end, None if `wait_readable` has to be awaited first.

        Raises:
            ConnectionClosedError: the connection broke off, or the peer sent an alert.
        """
        size, wanted, read = 0, len(buffer), self._tls.read
        while size < wanted:
            try:
                count: int = read(wanted - size, buffer[size:])  # type: ignore[assignment]
            except ssl.SSLError as error:  # after some bytes it is left to the next call
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
        """Send `data` and `body`. Shielded from cancellation once begun: half a frame would corrupt the connection."""
        try:
            self._send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            self._encrypt(data)
            if body is not None and len(body) > _WRITE_SIZE:
                await self._write_in_pieces(body)
                return
            if body is not None:
                self._encrypt(body)
            sealed = self._outgoing.read()
            rest = memoryview(sealed) if self._socket is None else self._send_now(memoryview(sealed))
            if rest:
                async with self._uninterrupted():
                    await self._send_rest(rest)
        finally:
            self._send_lock.release()

    async def _write_in_pieces(self, body: memoryview) -> None:
        """Encrypt and send one piece after the other, so that the peer decrypts the first while the next is sent."""
        async with self._uninterrupted():
            for begin in range(0, len(body), _WRITE_SIZE):
                self._encrypt(body[begin : begin + _WRITE_SIZE])
                await self._send(self._outgoing.read())

    def _encrypt(self, data: bytes | memoryview) -> None:
        try:
            self._tls.write(cast(bytes, data))
        except ssl.SSLError as error:
            raise ConnectionClosedError(f"TLS: {error}") from error

    @asynccontextmanager
    async def _uninterrupted(self) -> AsyncIterator[None]:
        """Shield the sending of a frame from cancellation; close the connection if it takes `SEND_TIMEOUT` seconds."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_TIMEOUT) as scope:
            yield
        if scope.cancelled_caught:
            await self.close()
            raise ConnectionClosedError(f"the peer accepted no data for {SEND_TIMEOUT:g} s")

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._send(self._outgoing.read())

    async def _flush_quietly(self) -> None:
        """Send pending TLS alerts, if the peer is still there."""
        try:
            await self._flush()
        except ConnectionClosedError:
            _log.debug("the connection was closed before a TLS alert could be sent")

    async def wait_readable(self, *, fair: bool = True) -> None:
        """Wait for ciphertext and pass it to TLS; with `fair`, let other tasks run even if it is there already."""
        if isinstance(self._raw, CircuitConnection):  # its bytes are counted by the connection to the relay
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
        if fair and not waited:  # let other tasks run; the bytes are in TLS already, so a cancellation loses none
            await trio.lowlevel.checkpoint()

    def _receive_now(self, socket: trio.socket.SocketType) -> bool:
        """Pass what the socket has to TLS; return False if it has nothing now."""
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

    async def _send(self, data: bytes) -> None:
        rest = memoryview(data) if self._socket is None else self._send_now(memoryview(data))
        if rest:
            await self._send_rest(rest)

    async def _send_rest(self, rest: memoryview) -> None:
        """Send what the socket did not accept at once; over a relay, everything."""
        if self._socket is None:
            await self._raw.write(cast(bytes, rest))
            return
        while rest:
            try:
                await trio.lowlevel.wait_writable(self._socket.socket.fileno())
            except (OSError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(f"the connection broke off: {error}") from error
            rest = self._send_now(rest)

    def _send_now(self, data: memoryview) -> memoryview:
        """Send what the socket accepts at once; return the rest."""
        assert self._socket is not None
        descriptor = self._socket.socket.fileno()
        try:
            while data:  # the kernel often accepts a part of a large piece, and the rest in the next call
                count = os.write(descriptor, data)
                self._bytes.sent += count
                data = data[count:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionClosedError(f"the connection broke off: {error}") from error
        return data

    async def close(self) -> None:
        """Send close_notify if that needs no waiting, and close the connection."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 0.5):
            if self._socket is not None and not self._send_lock.locked():
                # does not wait for the peer's close_notify; before the end of the handshake there is none to send
                with suppress(ssl.SSLError, ValueError):
                    self._tls.unwrap()
                await self._flush_quietly()
        if self._socket is None:
            await self._raw.close()
        else:
            await trio.aclose_forcefully(self._socket)

    # --------------------------------------------------------------------------------------------- properties

    def get_local_peer(self) -> ID:
        """Return the local peer id as py-libp2p's type."""
        assert self._local is not None
        return self._local[0]

    def get_local_private_key(self) -> PrivateKey:
        """Return the local private key as py-libp2p's type."""
        assert self._local is not None
        return self._local[1]

    def get_remote_peer(self) -> ID:
        """Return the authenticated peer's id."""
        assert self._peer is not None
        return ID(self._peer.raw)

    def get_remote_public_key(self) -> PublicKey:
        """Return the authenticated peer's public key."""
        assert self._peer is not None
        return Ed25519PublicKey.from_bytes(self._peer.public_key)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port of the other end; None on a relayed connection."""
        address: tuple[str, int] | None = self._raw.get_remote_address()
        return address

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the addresses of the raw connection."""
        return list(self._raw.get_transport_addresses())

    def get_connection_type(self) -> ConnectionType:
        """Return whether the connection is direct or relayed."""
        return self._raw.get_connection_type()


class TlsTransport(ISecureTransport):
    """Upgrades raw connections to TLS; logs refusals, the same one at most once a minute."""

    def __init__(self, identity: Identity, state: SecurityState) -> None:
        self._state = state
        self._refusals = LogThrottle()
        self._keys = libp2p_key_pair(identity)
        self._local = ID.from_pubkey(self._keys.public_key)

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Run the server side of the handshake."""
        return await self._secure(conn, server=True)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Run the client side of the handshake. `dial.upgrade` checks that the peer is the expected one."""
        return await self._secure(conn, server=False)

    async def _secure(self, conn: IRawConnection, *, server: bool) -> TlsConnection:
        bios = (ssl.MemoryBIO(), ssl.MemoryBIO())
        contexts = self._state.contexts
        tls = contexts.recording[server].wrap_bio(*bios, server_side=server)
        secured = TlsConnection(conn, tls, bios)
        secured.attach(self._state, self._local, self._keys.private_key)
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT):
                await secured.handshake()
        except RefusedError as error:
            if secured.refused_for is not None:
                self._state.events.emit(PeerRejected(secured.shown_peer(), secured.refused_for, str(error)))
            self._log_refusal(conn, secured, str(error), "from" if server else "to")
            raise HandshakeFailure(str(error)) from error
        except trio.TooSlowError as error:
            raise ConnectionClosedError(f"no TLS handshake within {HANDSHAKE_TIMEOUT:g} s") from error
        tls.context = contexts.plain[server]  # the recording hook costs a Python call for every record
        return secured

    def _log_refusal(self, conn: IRawConnection, secured: TlsConnection, error: str, direction: str) -> None:
        address = conn.get_remote_address()
        host = address[0] if address and not secured.is_initiator else address  # the port of a client changes each time
        key = (direction, secured.shown_peer() or host, error)
        self._refusals.log(
            _log, logging.WARNING, key, "connection %s %s refused: %s", direction, describe_address(conn), error
        )


def describe_address(conn: Any) -> str:
    """Describe the remote address of a raw connection for logs."""
    address = conn.get_remote_address()
    return f"{address[0]}:{address[1]}" if address else "a relayed peer"
