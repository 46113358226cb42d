"""Whoever is no node of this network is refused, dialling and dialled, and both ends are told why and what to do."""

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
from bounded_waits import run, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from scripted_peer import expect, line

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p import host, security
from hypha_net.errors import RefusedError, UnreachableError
from hypha_net.events import Dialled, Refused
from hypha_net.identity import Identity, load_identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
DAY = dt.timedelta(days=1)


HELLO = line("/multistream/1.0.0")
TLS = line("/tls/1.0.0")


# ----------------------------------------------------------------------------------------------------- certificates

Files = tuple[Path, Path]


def of_time(valid: tuple[dt.timedelta, dt.timedelta], authority: Any, _foreign: Any) -> Files:
    cert, key, _ = authority.files("stranger", valid=valid)
    return cert, key


def of_another_ca(_authority: Any, foreign: Any) -> Files:
    cert, key, _ = foreign.files("stranger")
    return cert, key


def revoked(authority: Any, _foreign: Any) -> Files:
    identity = authority.identity("stranger")
    authority.revocations(identity.certificate.serial)
    return identity.cert_pem, identity.key_pem


def of_another_kind_of_key(authority: Any, _foreign: Any) -> Files:
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


def signed_by_itself(authority: Any, _foreign: Any) -> Files:
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
    """A certificate that does not do: what is said of it here, and what TLS tells its owner."""

    make: Callable[[Any, Any], Files]
    words: tuple[str, ...]
    alert: str
    """OpenSSL's name; empty where the certificate is refused only after the handshake, by a close."""
    reason: str


CASES = {
    "unknown ca": Case(
        of_another_ca, ("'stranger'", "'other org'", "compare trust_pem of both nodes"), "UNKNOWN_CA", "untrusted"
    ),
    "expired": Case(
        partial(of_time, (-3 * DAY, -DAY)),
        ("'stranger'", "has expired", "renewed; check the clocks"),
        "CERTIFICATE_EXPIRED",
        "expired",
    ),
    "not yet valid": Case(
        partial(of_time, (DAY, 3 * DAY)),
        ("'stranger'", "not yet valid", "check the clocks of both nodes"),
        "BAD_CERTIFICATE",
        "untrusted",
    ),
    "revoked": Case(revoked, ("'stranger'", "revoked", "ask the organisation"), "CERTIFICATE_REVOKED", "revoked"),
    "wrong key type": Case(
        of_another_kind_of_key, ("'stranger'", "ECPublicKey", "Ed25519 keys only", "hypha-certutil"), "", "untrusted"
    ),
    "self-signed": Case(
        signed_by_itself, ("certificate", "self-signed", "compare trust_pem"), "UNKNOWN_CA", "untrusted"
    ),
}


def judge(authority: Any) -> Identity:
    """A node that checks revocations."""
    crls = authority.folder / "crls.pem"
    cert, key, trust = authority.files("judge")
    return load_identity(cert, key, trust, crls if crls.exists() else authority.revocations())


def stranger_s(files: Files, *, server: bool) -> ssl.SSLContext:
    """TLS of somebody who trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(*files)
    return context


async def alert_received(stream: trio.SSLStream[trio.SocketStream]) -> str:
    """What TLS tells this side; empty when the connection just ends."""
    try:
        await stream.do_handshake()
        await stream.receive_some(1)
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        return str(cause.reason) if isinstance(cause, ssl.SSLError) and cause.reason else ""
    return ""


@pytest.mark.parametrize("name", CASES)
def test_a_certificate_that_does_not_do_is_refused_when_it_dials(
    authority: Any, foreign_authority: Any, caplog: Any, name: str
) -> None:
    case = CASES[name]

    async def main() -> None:
        files = case.make(authority, foreign_authority)
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(judge(authority), settings) as node:
            raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
            await raw.send_all(HELLO + TLS)
            await expect(raw, HELLO + TLS)
            with node.events.follow(Refused) as events:
                context = stranger_s(files, server=False)
                told = await alert_received(trio.SSLStream(raw, context, https_compatible=True))
                refused = await anext(events)
            assert isinstance(refused, Refused)
            assert refused.reason == case.reason
            assert case.alert in told
            assert not node.connected_peers()

    with caplog.at_level(logging.WARNING):
        run(main)
    (said,) = [record.getMessage() for record in caplog.records if "connection from 127.0.0.1" in record.getMessage()]
    assert all(words in said for words in case.words), said


@asynccontextmanager
async def listening(serve: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """A program on a port, and its multiaddr."""
    async with trio.open_nursery() as tasks:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        tasks.start_soon(partial(trio.serve_listeners, serve, [listener]))
        yield f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("name", CASES)
def test_a_certificate_that_does_not_do_is_refused_when_it_is_dialled(
    authority: Any, foreign_authority: Any, name: str
) -> None:
    case = CASES[name]
    told: list[str] = []

    async def main() -> None:
        context = stranger_s(case.make(authority, foreign_authority), server=True)

        async def serve(raw: trio.SocketStream) -> None:
            for message in (HELLO, TLS):
                await expect(raw, message)
                await raw.send_all(message)
            secured = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
            told.append(await alert_received(secured))

        async with listening(serve) as address, open_endpoint(judge(authority), EndpointSettings()) as node:
            with node.events.follow(Refused, Dialled) as events, pytest.raises(RefusedError) as caught:
                await node.connect(address)
            assert all(words in str(caught.value) for words in case.words), str(caught.value)
            refused, dialled = await anext(events), await anext(events)
            assert isinstance(refused, Refused)
            assert isinstance(dialled, Dialled)
            assert (refused.reason, dialled.outcome, dialled.address) == (case.reason, "refused", address)
            await until(lambda: bool(told))
            assert case.alert in told[0]
            assert not node.connected_peers()

    run(main)


# ------------------------------------------------------------------------------------------------- no node at all

NO_NODE = {
    "noise": (HELLO + line("na"), "does not speak /tls/1.0.0"),
    "plaintext": (HELLO + line("na"), "does not speak /tls/1.0.0"),
    "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "did not answer"),  # a length, and bytes that never come
    "rubbish": (b"\xff" * 40, "."),
    "rubbish in tls": (HELLO + TLS + b"no hello of TLS" * 40, "TLS handshake failed"),
}


@pytest.mark.parametrize("name", NO_NODE)
def test_who_does_not_speak_mutual_tls_is_not_taken_for_a_node_when_dialled(authority: Any, name: str) -> None:
    answer, words = NO_NODE[name]

    async def main() -> None:
        async def serve(raw: trio.SocketStream) -> None:
            with suppress(trio.BrokenResourceError):
                await raw.receive_some(100)
                await raw.send_all(answer)
                while await raw.receive_some(100):
                    pass

        async with listening(serve) as address, open_endpoint(judge(authority), EndpointSettings()) as node:
            with node.events.follow(Dialled) as events, pytest.raises(UnreachableError, match=words):
                await node.connect(address, timeout=1 if name == "http" else 10)
            dialled = await anext(events)
            assert isinstance(dialled, Dialled)
            assert dialled.outcome in ("refused", "unreachable", "timeout")
            assert not node.connected_peers()

    run(main)


@pytest.mark.parametrize("said", [b"", HELLO, HELLO + TLS], ids=["nothing", "hello", "tls"])
@pytest.mark.parametrize(
    "then", ["closes", pytest.param("is silent", marks=[pytest.mark.slow, pytest.mark.concurrent])]
)
def test_who_ends_or_falls_silent_has_refused_nobody(
    authority: Any, monkeypatch: pytest.MonkeyPatch, said: bytes, then: str
) -> None:
    """A gateway that is stopped or restarted is tried again soon, one that refuses is left in peace for longer."""
    monkeypatch.setattr(host, "NEGOTIATE_TIMEOUT", 0.5)
    monkeypatch.setattr(security, "HANDSHAKE_TIMEOUT", 0.5)

    async def main() -> None:
        async def serve(raw: trio.SocketStream) -> None:
            await expect(raw, HELLO)
            await raw.send_all(said)
            if then == "is silent":
                await anyio.sleep_forever()

        async with listening(serve) as address, open_endpoint(judge(authority), EndpointSettings()) as node:
            with pytest.raises(UnreachableError) as caught:
                await node.connect(address, timeout=5)
            assert not isinstance(caught.value, RefusedError), str(caught.value)

    run(main)


def test_a_dialler_that_speaks_something_else_is_told_of(authority: Any, caplog: Any) -> None:
    async def main() -> None:
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(judge(authority), settings) as node:
            with node.events.follow(Refused) as events:
                raw = await trio.open_tcp_stream("127.0.0.1", int(node.addresses[0].split("/")[4]))
                await raw.send_all(line("/another/1.0.0"))
                refused = await anext(events)
            assert isinstance(refused, Refused)
            assert (refused.peer, refused.reason) == (None, "protocol")
            assert "does not speak /tls/1.0.0" in refused.detail

    with caplog.at_level(logging.INFO):
        run(main)
    assert "no Hypha node" in caplog.text


def test_another_peer_than_the_one_named_is_refused_and_both_are_told(authority: Any, caplog: Any) -> None:
    async def main() -> None:
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with (
            open_endpoint(authority.identity("gateway"), settings) as one,
            open_endpoint(authority.identity("leaf"), EndpointSettings()) as two,
        ):
            wrong = one.addresses[0].replace(str(one.peer_id), str(two.peer_id.from_public_key(bytes(32))))
            with pytest.raises(RefusedError, match=r"'gateway' .* was expected: correct the address"):
                await two.connect(wrong)
            await until(lambda: "does it expect another peer here" in caplog.text)
            assert "'leaf'" in caplog.text
            assert not one.connected_peers()

    with caplog.at_level(logging.INFO):
        run(main)


def test_a_node_whose_certificate_has_run_out_is_told_so_by_the_other_end(authority: Any) -> None:
    async def main() -> None:
        brief = load_identity(*authority.files("brief", valid=(-DAY, dt.timedelta(seconds=2.5))))
        async with (
            open_endpoint(authority.identity("gateway"), EndpointSettings((LOOPBACK,), role="gateway")) as one,
            open_endpoint(brief, EndpointSettings((LOOPBACK,))) as two,
        ):
            await anyio.sleep(max(0.0, brief.certificate.not_after - dt.datetime.now().timestamp() + 0.1))
            with pytest.raises(RefusedError, match=r"this node's certificate: ours has expired: have it renewed"):
                await two.connect(one.addresses[0])
            with pytest.raises(RefusedError, match=r"'brief' .* has expired: its owner has to have it renewed"):
                await one.connect(two.addresses[0])

    run(main)
