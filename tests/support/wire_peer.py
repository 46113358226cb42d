"""A scripted libp2p peer for tests that behaves like rust-libp2p and shares no code with ours but TLS keys.

TCP or a relayed connection, multistream-select, TLS 1.3 by the standard library, multistream-select again, yamux
frames, and on a stream whatever the test sends. It answers pings, unless told not to, and sends none, half-closes after
a request, and drops its connection when the test asks for it.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
_HEADER: Final = struct.Struct(">BBHII")
MULTISTREAM: Final = "/multistream/1.0.0"
IDENTIFY: Final = "/ipfs/id/1.0.0"


def varint(number: int) -> bytes:
    """Encode an unsigned varint."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def field(number: int, value: bytes | int) -> bytes:
    """Encode a field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(message: bytes) -> dict[int, list[Any]]:
    """Decode the fields of a protobuf message: integers, and bytes for length-delimited values."""
    found: dict[int, list[Any]] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            found.setdefault(key >> 3, []).append(number())
        else:
            assert key & 7 == 2
            size = number()
            found.setdefault(key >> 3, []).append(message[at : at + size])
            at += size
    return found


def line(text: str) -> bytes:
    """Encode a multistream-select message."""
    return varint(len(text) + 1) + text.encode() + b"\n"


class Stream(trio.abc.Stream):
    """A yamux stream of the scripted peer; reading reopens the receive window."""

    def __init__(self, peer: WirePeer, number: int) -> None:
        self.peer = peer
        self.number = number
        self.protocol = ""
        self.ended = False
        """Set when the remote side has half-closed."""
        self.was_reset = False
        self._come = bytearray()
        self._changed = trio.Event()

    def take(self, data: bytes, flags: int) -> None:
        """Process a received frame."""
        self._come += data
        self.ended |= bool(flags & FIN)
        self.was_reset |= bool(flags & RST)
        self._changed.set()
        self._changed = trio.Event()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive bytes; empty after the remote half-close. Raises `BrokenResourceError` after a reset."""
        while not self._come:
            if self.was_reset:
                raise trio.BrokenResourceError("reset by the other side")
            if self.ended:
                return b""
            await self._changed.wait()
        data = bytes(self._come[: max_bytes or len(self._come)])
        del self._come[: len(data)]
        await self.peer.frame(WINDOW, 0, self.number, len(data))
        return data

    async def read_all(self) -> bytes:
        """Read until the remote side half-closes."""
        data = b""
        while part := await self.receive_some():
            data += part
        return data

    async def exactly(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = b""
        while len(data) < size:
            part = await self.receive_some(size - len(data))
            assert part, f"the stream ended after {data!r}"
            data += part
        return data

    async def message(self) -> bytes:
        """Read a length-prefixed message."""
        size = shift = 0
        while True:
            [byte] = await self.exactly(1)
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return await self.exactly(size)

    async def send_all(self, data: Any) -> None:
        """Send bytes, at most the initial 256 KiB window of the remote side."""
        for start in range(0, len(data), 32 << 10):
            await self.peer.frame(DATA, 0, self.number, bytes(data[start : start + (32 << 10)]))

    async def say(self, message: bytes) -> None:
        """Send a length-prefixed message."""
        await self.send_all(varint(len(message)) + message)

    async def wait_send_all_might_not_block(self) -> None:
        """Return at once; sending never blocks."""
        await trio.lowlevel.checkpoint()

    async def half_close(self) -> None:
        """Send FIN."""
        await self.peer.frame(DATA, FIN, self.number, b"")

    async def reset(self) -> None:
        """Send RST."""
        await self.peer.frame(WINDOW, RST, self.number, 0)

    async def aclose(self) -> None:
        """Send FIN."""
        await self.half_close()


Handler = Callable[[Stream], Awaitable[None]]


class WirePeer:
    """One connection to a node under test."""

    def __init__(self, secured: trio.SSLStream[Any], *, opened: bool) -> None:
        self._secured = secured
        self._next = 1 if opened else 2
        self._streams: dict[int, Stream] = {}
        self._sending = trio.Lock()
        self.handlers: dict[str, Handler] = {}
        self.remote = b""
        """The remote side's peer id, from its certificate."""
        self.answers_pings = True
        self.closed = trio.Event()

    async def frame(self, kind: int, flags: int, number: int, content: bytes | int) -> None:
        """Write one yamux frame; `content` is data, or a header's length field."""
        data = content if isinstance(content, bytes) else b""
        length = content if isinstance(content, int) else len(content)
        async with self._sending:
            await self._secured.send_all(_HEADER.pack(0, kind, flags, number, length) + data)

    async def open(self, protocol: str) -> Stream:
        """Open a stream and agree on its protocol."""
        stream = self._streams[self._next] = Stream(self, self._next)
        self._next += 2
        await self.frame(DATA, SYN, stream.number, line(MULTISTREAM) + line(protocol))
        wanted = line(MULTISTREAM) + line(protocol)
        assert await stream.exactly(len(wanted)) == wanted
        stream.protocol = protocol
        return stream

    async def ask(self, protocol: str, message: bytes) -> tuple[bytes, bytes]:
        """Send one message and half-close; return the answer and everything after it until the remote half-close."""
        stream = await self.open(protocol)
        await stream.say(message)
        await stream.half_close()
        return await stream.message(), await stream.read_all()

    async def run(self) -> None:
        """Process received frames until the connection ends."""
        waiting = bytearray()
        try:
            async with trio.open_nursery() as tasks:
                while part := await self._secured.receive_some(65536):
                    waiting += part
                    while (taken := self._next_frame(waiting)) is not None:
                        await self._take(tasks, *taken)
                tasks.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.closed.set()
            for stream in self._streams.values():
                stream.take(b"", RST)

    @staticmethod
    def _next_frame(waiting: bytearray) -> tuple[int, int, int, int, bytes] | None:
        if len(waiting) < _HEADER.size:
            return None
        _, kind, flags, number, length = _HEADER.unpack_from(waiting)
        size = length if kind == DATA else 0
        if len(waiting) < _HEADER.size + size:
            return None
        data = bytes(waiting[_HEADER.size : _HEADER.size + size])
        del waiting[: _HEADER.size + size]
        return kind, flags, number, length, data

    async def _take(self, tasks: trio.Nursery, kind: int, flags: int, number: int, length: int, data: bytes) -> None:
        if kind == PING:
            if flags & SYN and self.answers_pings:
                await self.frame(PING, ACK, 0, length)
            return
        if kind == GO_AWAY:
            return
        if flags & SYN:
            self._streams[number] = Stream(self, number)
            await self.frame(WINDOW, ACK, number, 0)
            tasks.start_soon(self._serve, self._streams[number])
        if number in self._streams:
            self._streams[number].take(data, flags)

    async def _serve(self, stream: Stream) -> None:
        """Negotiate the first protocol that has a handler."""
        try:
            assert await stream.message() == MULTISTREAM.encode() + b"\n"
            await stream.send_all(line(MULTISTREAM))
            while True:
                wanted = (await stream.message()).decode().rstrip("\n")
                if wanted in self.handlers:
                    break
                await stream.send_all(line("na"))
            await stream.send_all(line(wanted))
            stream.protocol = wanted
            await self.handlers[wanted](stream)
        except (trio.BrokenResourceError, AssertionError):
            return

    async def drop(self) -> None:
        """Close the connection without GoAway, as an idle timeout does."""
        await trio.aclose_forcefully(self._secured)


def peer_id(public_key: bytes) -> bytes:
    """Encode the peer id of an Ed25519 key: the identity multihash of its protobuf."""
    return b"\x00\x24\x08\x01\x12\x20" + public_key


def identify(public_key: bytes, addresses: list[bytes], protocols: list[str], agent: str) -> bytes:
    """Encode an identify message."""
    message = field(1, b"\x08\x01\x12\x20" + public_key)
    message += b"".join(field(2, address) for address in addresses)
    message += b"".join(field(3, protocol.encode()) for protocol in protocols)
    return message + field(5, b"/hypha-identify/0.0.1") + field(6, agent.encode())


async def expect(stream: trio.abc.ReceiveStream, wanted: bytes) -> None:
    """Read bytes that must equal `wanted`."""
    data = bytearray()
    while len(data) < len(wanted):
        part = await stream.receive_some(len(wanted) - len(data))
        assert part, f"the connection ended after {bytes(data)!r}"
        data += part
    assert data == wanted


async def _select(stream: trio.abc.Stream, protocol: str, *, opened: bool) -> None:
    """Negotiate a protocol; the opener sends both lines at once, as lazy negotiation does."""
    wanted = [line(MULTISTREAM), line(protocol)]
    if opened:
        await stream.send_all(b"".join(wanted))
    for each in wanted:
        await expect(stream, each)
        if not opened:
            await stream.send_all(each)


@asynccontextmanager
async def speak(transport: trio.abc.Stream, identity: Any, *, opened: bool = True, **about: Any) -> AsyncIterator[Any]:
    """Secure and multiplex a connection, and serve identify and `handlers` on it while the context is open.

    Args:
        identity: whose certificate is presented (`hypha_net.identity.Identity`).
        opened: whether this side dialled.
        about: ``addresses`` (multiaddr bytes), ``handlers`` by protocol, ``agent``, ``answers_pings``.
    """
    await _select(transport, "/tls/1.0.0", opened=opened)
    context: ssl.SSLContext = identity.client_context() if opened else identity.server_context()
    secured = trio.SSLStream(transport, context, server_side=not opened, https_compatible=True)
    await secured.do_handshake()
    await _select(secured, "/yamux/1.0.0", opened=opened)
    peer = WirePeer(secured, opened=opened)
    certificate = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True))
    peer.answers_pings = about.get("answers_pings", True)
    peer.remote = peer_id(certificate.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
    handlers: dict[str, Handler] = about.get("handlers", {})
    key = identity.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    told = identify(key, about.get("addresses", []), [*handlers, IDENTIFY], about.get("agent", "hypha-rust/0.0.1"))

    async def tell(stream: Stream) -> None:
        await stream.say(told)
        await stream.half_close()

    peer.handlers = {**handlers, IDENTIFY: tell}
    async with trio.open_nursery() as tasks:
        tasks.start_soon(peer.run)
        try:
            yield peer
        finally:
            tasks.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(secured)


async def dial(address: str) -> trio.SocketStream:
    """Open a TCP connection to a multiaddr."""
    return await trio.open_tcp_stream(address.split("/")[2], int(address.split("/")[4]))
