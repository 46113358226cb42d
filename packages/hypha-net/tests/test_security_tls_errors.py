"""Refused TLS handshakes, in both directions: both sides report the reason and the remedy.

Certificates that OpenSSL accepts and `cryptography` rejects are refused, and others unaffected.
"""

from __future__ import annotations

import datetime as dt
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID, ObjectIdentifier
from support.endpoint_helpers import next_event
from support.gateways import LOOPBACK, open_gateway, open_node
from support.waiting import until
from support.wire_peer import expect, line

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.compat import host
from hypha_net._libp2p.security import tls
from hypha_net.errors import IdentityError, RefusedError, UnreachableError
from hypha_net.events import DialFinished, PeerRejected
from hypha_net.identity import Identity, load_identity, read_certificate

DAY = dt.timedelta(days=1)


HELLO = line("/multistream/1.0.0")
TLS = line("/tls/1.0.0")


# ----------------------------------------------------------------------------------------------------- certificates

Files = tuple[Path, Path]


def with_validity(valid: tuple[dt.timedelta, dt.timedelta], authority: Any, _foreign: Any) -> Files:
    cert, key, _ = authority.files("stranger", valid=valid)
    return cert, key


def from_another_ca(_authority: Any, foreign: Any) -> Files:
    cert, key, _ = foreign.files("stranger")
    return cert, key


def revoked(authority: Any, _foreign: Any) -> Files:
    identity = authority.identity("stranger")
    authority.revocations(identity.certificate.serial)
    return identity.cert_pem, identity.key_pem


def with_ecdsa_key(authority: Any, _foreign: Any) -> Files:
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stranger")]))
        .issuer_name(authority.org.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .sign(authority.org.key, None)
    )
    cert_pem, key_pem = authority.folder / "stranger-cert.pem", authority.folder / "stranger-key.pem"
    cert_pem.write_bytes(certificate.public_bytes(ser.Encoding.PEM) + authority.org.pem())
    key_pem.write_bytes(key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption()))
    return cert_pem, key_pem


def self_signed(authority: Any, _foreign: Any) -> Files:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "stranger")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - DAY).not_valid_after(now + DAY)
    cert_pem, key_pem = authority.folder / "stranger-cert.pem", authority.folder / "stranger-key.pem"
    cert_pem.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(ser.Encoding.PEM))
    key_pem.write_bytes(key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption()))
    return cert_pem, key_pem


@dataclass(frozen=True)
class Case:
    """A bad certificate: the words of the refusal, and the TLS alert that its owner receives."""

    make: Callable[[Any, Any], Files]
    words: tuple[str, ...]
    alert: str
    """OpenSSL's name; empty where the refusal comes after the handshake, as a close."""
    reason: str


CASES = {
    "unknown ca": Case(
        from_another_ca, ("'stranger'", "'other org'", "compare trust_pem of both nodes"), "UNKNOWN_CA", "untrusted"
    ),
    "expired": Case(
        partial(with_validity, (-3 * DAY, -DAY)),
        ("'stranger'", "has expired", "renewed; check the clocks"),
        "CERTIFICATE_EXPIRED",
        "expired",
    ),
    "not yet valid": Case(
        partial(with_validity, (DAY, 3 * DAY)),
        ("'stranger'", "not yet valid", "check the clocks of both nodes"),
        "BAD_CERTIFICATE",
        "untrusted",
    ),
    "revoked": Case(revoked, ("'stranger'", "revoked", "ask the organisation"), "CERTIFICATE_REVOKED", "revoked"),
    "wrong key type": Case(
        with_ecdsa_key, ("'stranger'", "ECPublicKey", "Ed25519 keys only", "hypha-certutil"), "", "untrusted"
    ),
    "self-signed": Case(self_signed, ("certificate", "self-signed", "compare trust_pem"), "UNKNOWN_CA", "untrusted"),
}


def checking_identity(authority: Any) -> Identity:
    """Return an identity that checks revocations."""
    crls = authority.folder / "crls.pem"
    cert, key, trust = authority.files("checker")
    return load_identity(cert, key, trust, crls if crls.exists() else authority.revocations())


def trusting_context(files: Files, *, server: bool) -> ssl.SSLContext:
    """Return a TLS context that trusts every peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(*files)
    return context


async def alert_received(stream: trio.SSLStream[trio.SocketStream]) -> str:
    """Return the TLS alert that this side receives; empty if the connection just ends."""
    try:
        await stream.do_handshake()
        await stream.receive_some(1)
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        return str(cause.reason) if isinstance(cause, ssl.SSLError) and cause.reason else ""
    return ""


@pytest.mark.parametrize("name", CASES)
async def test_bad_certificate_of_a_dialler_is_refused(
    authority: Any, foreign_authority: Any, caplog: Any, name: str
) -> None:
    case = CASES[name]
    with caplog.at_level(logging.WARNING):
        files = case.make(authority, foreign_authority)
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(checking_identity(authority), settings) as node:
            raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
            await raw.send_all(HELLO + TLS)
            await expect(raw, HELLO + TLS)
            with node.events.follow(PeerRejected) as events:
                context = trusting_context(files, server=False)
                told = await alert_received(trio.SSLStream(raw, context, https_compatible=True))
                refused = await next_event(events, PeerRejected)
            assert refused.reason == case.reason
            assert case.alert in told
            assert not node.connected_peers()
    (said,) = [record.getMessage() for record in caplog.records if "connection from 127.0.0.1" in record.getMessage()]
    assert all(words in said for words in case.words), said


@asynccontextmanager
async def listening(serve: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """Run a TCP server and yield its multiaddr."""
    async with trio.open_nursery() as tasks:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        tasks.start_soon(partial(trio.serve_listeners, serve, [listener]))
        yield f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("name", CASES)
async def test_bad_certificate_of_a_listener_is_refused(authority: Any, foreign_authority: Any, name: str) -> None:
    case = CASES[name]
    told: list[str] = []
    context = trusting_context(case.make(authority, foreign_authority), server=True)

    async def serve(raw: trio.SocketStream) -> None:
        for message in (HELLO, TLS):
            await expect(raw, message)
            await raw.send_all(message)
        secured = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        told.append(await alert_received(secured))

    async with listening(serve) as address, open_endpoint(checking_identity(authority), EndpointSettings()) as node:
        with node.events.follow(PeerRejected, DialFinished) as events, pytest.raises(RefusedError) as caught:
            await node.connect(address)
        assert all(words in str(caught.value) for words in case.words), str(caught.value)
        refused, dialled = await anext(events), await anext(events)
        assert isinstance(refused, PeerRejected)
        assert isinstance(dialled, DialFinished)
        assert (refused.reason, dialled.outcome, dialled.address) == (case.reason, "refused", address)
        await until(lambda: bool(told))
        assert case.alert in told[0]
        assert not node.connected_peers()


# ------------------------------------------------------------------------------------------------- other servers

OTHER_SERVERS = {
    "noise": (HELLO + line("na"), "does not speak /tls/1.0.0"),
    "plaintext": (HELLO + line("na"), "does not speak /tls/1.0.0"),
    "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "did not answer"),  # read as a length, of a line that never comes
    "rubbish": (b"\xff" * 40, "does not speak /tls/1.0.0"),
    "rubbish in tls": (HELLO + TLS + b"no hello of TLS" * 40, "TLS handshake failed"),
}


@pytest.mark.parametrize("name", OTHER_SERVERS)
async def test_dialling_a_listener_without_mutual_tls_fails(authority: Any, name: str) -> None:
    answer, words = OTHER_SERVERS[name]

    async def serve(raw: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await raw.receive_some(100)
            await raw.send_all(answer)
            while await raw.receive_some(100):
                pass

    async with listening(serve) as address, open_endpoint(checking_identity(authority), EndpointSettings()) as node:
        with node.events.follow(DialFinished) as events, pytest.raises(UnreachableError, match=words):
            await node.connect(address, timeout=1 if name == "http" else 10)
        dialled = await next_event(events, DialFinished)
        assert dialled.outcome in ("refused", "unreachable", "timeout")
        assert not node.connected_peers()


@pytest.mark.parametrize("said", [b"", HELLO, HELLO + TLS], ids=["nothing", "hello", "tls"])
@pytest.mark.parametrize("then", ["closes", pytest.param("is silent", marks=pytest.mark.nightly)])
async def test_closed_or_silent_connection_is_not_a_refusal(
    authority: Any, monkeypatch: pytest.MonkeyPatch, said: bytes, then: str
) -> None:
    """A gateway that restarts is retried soon; one that refuses is retried after a longer pause."""
    monkeypatch.setattr(host, "NEGOTIATE_TIMEOUT", 0.5)
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT", 0.5)

    async def serve(raw: trio.SocketStream) -> None:
        await expect(raw, HELLO)
        await raw.send_all(said)
        if then == "is silent":
            await anyio.sleep_forever()

    async with listening(serve) as address, open_endpoint(checking_identity(authority), EndpointSettings()) as node:
        with pytest.raises(UnreachableError) as caught:
            await node.connect(address, timeout=5)
        assert not isinstance(caught.value, RefusedError), str(caught.value)


async def test_dialler_of_another_protocol_is_reported(authority: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(checking_identity(authority), settings) as node:
            with node.events.follow(PeerRejected) as events:
                raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
                await raw.send_all(line("/another/1.0.0"))
                refused = await next_event(events, PeerRejected)
            assert (refused.peer, refused.reason) == (None, "protocol")
            assert "does not speak /tls/1.0.0" in refused.detail
    assert "no Hypha node" in caplog.text


async def test_unexpected_peer_is_refused_and_both_sides_report_it(authority: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        async with open_gateway(authority) as one, open_node(authority, "leaf") as two:
            wrong = one.addresses[0].replace(str(one.peer_id), str(two.peer_id.from_public_key(bytes(32))))
            with pytest.raises(RefusedError, match=r"'gateway' .* was expected: correct the address"):
                await two.connect(wrong)
            await until(lambda: "does it expect another peer here" in caplog.text)
            assert "'leaf'" in caplog.text
            assert not one.connected_peers()


MALFORMED = {
    "duplicate extension": (b"\x06\x03\x55\x1d\x63", b"\x06\x03\x55\x1d\x11"),
    "unsupported name type": (b"\x82\x04odd.", b"\xa3\x04odd."),
    "unknown version": (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05"),
}
"""Bytes of a valid certificate, and the bytes that replace them."""


def malformed_certificate(name: str, key: Ed25519PrivateKey) -> bytes:
    """Return a self-signed malformed certificate as DER."""
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")]), dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(4711).not_valid_before(now - DAY).not_valid_after(now + DAY)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("odd.")]), critical=False)
    unknown = x509.UnrecognizedExtension(ObjectIdentifier("2.5.29.99"), b"\x04\x00")
    usual = builder.add_extension(unknown, critical=False).sign(key, None).public_bytes(ser.Encoding.DER)
    old, new = MALFORMED[name]
    assert old in usual
    return usual.replace(old, new, 1)


def client_context(name: str, folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a dialler that shows a malformed certificate."""
    key = Ed25519PrivateKey.generate()
    path = folder / "odd.pem"
    keys = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
    path.write_bytes(ssl.DER_cert_to_PEM_cert(malformed_certificate(name, key)).encode() + keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(path)
    return context


@pytest.mark.parametrize("name", ["unsupported name type"])  # Python's TLS cannot send the others
async def test_malformed_certificate_is_refused_and_the_node_continues(authority: Any, caplog: Any, name: str) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_gateway(authority) as node:
            raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
            await raw.send_all(HELLO + TLS)
            await expect(raw, HELLO + TLS)
            client = trio.SSLStream(raw, client_context(name, authority.folder), https_compatible=True)
            with node.events.follow(PeerRejected) as events:
                with pytest.raises(trio.BrokenResourceError):
                    await client.do_handshake()
                    await client.receive_some(1)
                refused = await next_event(events, PeerRejected)
            assert refused.reason == "untrusted"
            async with open_node(authority, "good") as good:
                assert await good.connect(node.addresses[0]) == node.peer_id
                await until(lambda: good.peer_id in node.connected_peers())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name", MALFORMED)
def test_reading_a_malformed_certificate_explains_it(name: str) -> None:
    with pytest.raises(IdentityError, match="the peer's certificate cannot be read: "):
        read_certificate(malformed_certificate(name, Ed25519PrivateKey.generate()), "the peer's certificate")


def test_certificate_with_unknown_key_type_is_an_identity_error() -> None:
    key = Ed25519PrivateKey.generate()
    der = malformed_certificate("duplicate extension", key)
    at = der.index(key.public_key().public_bytes_raw())
    unknown = der[: at - 6] + b"\x2b\x65\x79" + der[at - 3 :]  # 1.3.101.121 instead of 1.3.101.112
    with pytest.raises(IdentityError, match="cannot be read: Unknown key type"):
        read_certificate(unknown, "it")


def test_malformed_certificate_in_a_bundle_is_an_identity_error_naming_the_file(authority: Any) -> None:
    cert, key, trust = authority.files("node")
    odd = malformed_certificate("unknown version", Ed25519PrivateKey.generate())
    trust.write_bytes(trust.read_bytes() + ssl.DER_cert_to_PEM_cert(odd).encode())
    with pytest.raises(IdentityError, match=f"trust_pem {trust} holds no PEM certificate: .* not a valid X509 version"):
        load_identity(cert, key, trust)
