"""Certificates that OpenSSL accepts and `cryptography` rejects: their owners are refused, others are unaffected."""

from __future__ import annotations

import datetime as dt
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID, ObjectIdentifier
from support.waiting import until
from support.wire_peer import expect, line

from hypha_net import EndpointSettings, open_endpoint
from hypha_net.errors import IdentityError
from hypha_net.events import PeerRejected
from hypha_net.identity import load_identity, read_certificate

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
HELLO = line("/multistream/1.0.0")
TLS = line("/tls/1.0.0")
DAY = dt.timedelta(days=1)

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
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(authority.identity("gateway"), settings) as node:
            raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
            await raw.send_all(HELLO + TLS)
            await expect(raw, HELLO + TLS)
            client = trio.SSLStream(raw, client_context(name, authority.folder), https_compatible=True)
            with node.events.follow(PeerRejected) as events:
                with pytest.raises(trio.BrokenResourceError):
                    await client.do_handshake()
                    await client.receive_some(1)
                refused = await anext(events)
            assert isinstance(refused, PeerRejected)
            assert refused.reason == "untrusted"
            async with open_endpoint(authority.identity("good"), EndpointSettings()) as good:
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
