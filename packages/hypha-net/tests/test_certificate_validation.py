"""Loading of identities, and certificates that change while a node runs: renewed, revoked, expired, unusable."""

from __future__ import annotations

import base64
import datetime as dt
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.endpoint_helpers import echo_at_once, next_event
from support.gateways import ECHO, LOOPBACK
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.security import certificate_monitor
from hypha_net.certificate_validation import WARN_AT, CertificateVerifier, ExpiryWarnings, build_chain
from hypha_net.errors import IdentityError, StreamResetError, UnreachableError
from hypha_net.events import Disconnected, PeerRejected
from hypha_net.identity import Identity, load_identity

DAY = dt.timedelta(days=1)
QUICK = 0.1


@asynccontextmanager
async def opened(identity: Identity, *gateways: str, **changes: Any) -> AsyncIterator[Libp2pEndpoint]:
    """Open a node that checks its certificates ten times a second."""
    settings = EndpointSettings((LOOPBACK,), gateway_addresses=gateways, certificate_interval=QUICK, **changes)
    async with open_endpoint(identity, settings) as node:
        yield node


# ------------------------------------------------------------------------------------------------------------ reloading


async def test_a_renewed_certificate_is_presented_without_a_restart(authority: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        gateway = authority.identity("gateway", "gateway")
        async with opened(gateway, role="gateway") as one, opened(authority.identity("leaf")) as two:
            await two.connect(one.addresses[0])
            before = two.connected_peers()[one.peer_id].certificate_not_after
            authority.renew("gateway", 60 * DAY)
            await until(lambda: "certificates reloaded" in caplog.text)
            assert one.peer_id == gateway.peer_id
            assert one.connected_peers(), "a connection that is still good stays"
            await two.disconnect(one.peer_id)
            await two.connect(one.addresses[0])
            after = two.connected_peers()[one.peer_id].certificate_not_after
            assert before is not None
            assert after is not None
            assert after - before > 20 * 86400


async def test_files_of_another_key_are_refused_with_a_remedy_in_the_log(
    authority: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Mock(wraps=certificate_monitor.file_state)
    monkeypatch.setattr(certificate_monitor, "file_state", looks)
    async with opened(authority.identity("gateway"), role="gateway") as one:
        authority.files("gateway")
        await until(lambda: "are not reloaded" in caplog.text)
        assert "another key" in caplog.text
        assert "restart the node" in caplog.text
        async with opened(authority.identity("leaf")) as two:
            assert await two.connect(one.addresses[0]) == one.peer_id
        seen = looks.call_count
        await until(lambda: looks.call_count > seen + 4)
    assert caplog.text.count("are not reloaded") == 1


@pytest.mark.parametrize("damage", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB", None], ids=["empty", "cut", "gone"])
async def test_unusable_files_leave_the_identity_unchanged(authority: Any, caplog: Any, damage: bytes | None) -> None:
    with caplog.at_level(logging.INFO):
        identity = authority.identity("gateway")
        whole = identity.trust_pem.read_bytes()
        async with opened(identity, role="gateway") as one, opened(authority.identity("leaf")) as two:
            if damage is None:
                identity.trust_pem.unlink()
            else:
                identity.trust_pem.write_bytes(damage)
            await until(lambda: "are not reloaded" in caplog.text)
            assert f"trust_pem {identity.trust_pem}" in caplog.text
            assert await two.connect(one.addresses[0]) == one.peer_id
            identity.trust_pem.write_bytes(whole)
            await until(lambda: "certificates reloaded" in caplog.text)


@pytest.mark.virtual_clock
async def test_a_file_is_read_after_it_has_been_written_completely(authority: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        identity = authority.identity("gateway")
        whole = identity.cert_pem.read_bytes()
        async with opened(identity, role="gateway"):
            with identity.cert_pem.open("wb", buffering=0) as file:
                for at in range(0, len(whole), 64):
                    file.write(whole[at : at + 64])
                    await anyio.sleep(QUICK / 2)
            while "certificates reloaded" not in caplog.text:
                await anyio.sleep(QUICK)
        assert "are not reloaded" not in caplog.text


@pytest.mark.parametrize("lists", [False, True])
async def test_connections_are_checked_against_a_bundle_without_root(authority: Any, lists: bool) -> None:
    def org_only(name: str, crls: Any = None) -> Identity:
        cert, key, trust = authority.files(name)
        trust.write_bytes(cert.read_bytes())  # as the Rust tool writes it: the node's own and the organisation's
        return load_identity(cert, key, trust, crls)

    crls = authority.revocations() if lists else None
    leaf = org_only("leaf", crls)
    async with opened(org_only("gateway", crls), role="gateway") as one, opened(leaf) as two:
        with two.events.follow(Disconnected) as ended:
            await two.connect(one.addresses[0])
            with anyio.move_on_after(10 * QUICK):
                await anext(ended)
                raise AssertionError("a good connection was ended")
        if lists:
            with one.events.follow(PeerRejected) as refused:
                authority.revocations(leaf.certificate.serial)
                told = await next_event(refused, PeerRejected)
            assert told.reason == "revoked"


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "not readable"])
async def test_files_that_change_during_a_reload_are_read_again(
    authority: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    identity = authority.identity("gateway")
    whole = identity.trust_pem.read_bytes()
    original = certificate_monitor.TlsContexts if readable else certificate_monitor.reload_identity
    calls = []

    def meddle(given: Identity) -> Any:
        calls.append(given)
        try:
            return original(given)  # type: ignore[operator]
        finally:
            if len(calls) == 1:
                identity.trust_pem.write_bytes(whole)

    with caplog.at_level(logging.INFO):
        async with opened(identity, role="gateway"):
            name = "TlsContexts" if readable else "reload_identity"
            monkeypatch.setattr(certificate_monitor, name, meddle)
            identity.trust_pem.write_bytes(whole + b"\n" if readable else b"")
            await until(lambda: "certificates reloaded" in caplog.text)
        assert len(calls) == 2


# ------------------------------------------------------------------------------------------------------- losing trust


async def test_a_peer_revoked_while_connected_is_disconnected(authority: Any, caplog: Any) -> None:
    crls = authority.revocations()
    bad = authority.identity("bad")
    gateway = load_identity(*authority.files("gateway"), crls)
    async with (
        opened(gateway, role="gateway") as one,
        opened(authority.identity("good")) as good,
        opened(bad, one.addresses[0]) as two,
    ):
        one.handle(ECHO, echo_at_once)
        await good.connect(one.addresses[0])
        await two.wait_for_gateway()
        await until(lambda: bool(two.addresses) and "p2p-circuit" in two.addresses[-1])
        stream = await two.open_stream(one.peer_id, [ECHO])
        await stream.send_all(b"x")
        assert await stream.receive_some() == b"x"
        with one.events.follow(PeerRejected) as events:
            authority.revocations(bad.certificate.serial)
            refused = await next_event(events, PeerRejected)
        assert (refused.peer, refused.reason) == (bad.peer_id, "revoked")
        assert "acme org" in refused.detail
        with pytest.raises(StreamResetError):
            await stream.receive_some()
        await until(lambda: bad.peer_id not in one.connected_peers())
        assert one._relay_server is not None
        assert not one._relay_server.has_reservation(bad.peer_id)
        assert good.peer_id in one.connected_peers()
        # it reconnects by itself, and is refused with the reason
        await until(lambda: "ours is revoked: ask the organisation" in caplog.text)
        assert bad.peer_id not in one.connected_peers()


async def test_a_revoked_peer_is_disconnected_from_circuits(authority: Any) -> None:
    crls = authority.revocations()
    bad = authority.identity("bad")
    settings = {"exclude_cidr": ("0.0.0.0/0",)}
    async with opened(authority.identity("gateway"), role="gateway") as hub:
        judge = load_identity(*authority.files("judge"), crls)
        async with opened(judge, hub.addresses[0], **settings) as one, opened(bad, hub.addresses[0]) as two:
            await two.wait_for_gateway()
            await until(lambda: "p2p-circuit" in two.addresses[-1])
            one.handle(ECHO, echo_at_once)
            two.handle(ECHO, echo_at_once)
            await one.wait_for_gateway()
            await one.open_stream(two.peer_id, [ECHO])
            assert not one.is_direct(two.peer_id)
            authority.revocations(bad.certificate.serial)
            await until(lambda: two.peer_id not in one.connected_peers())
            with pytest.raises(UnreachableError):
                await one.open_stream(two.peer_id, [ECHO], timeout=5)
            assert two.peer_id in hub.connected_peers(), "the gateway has no lists and keeps it"


async def test_a_peer_whose_certificate_expires_while_connected_is_disconnected(authority: Any) -> None:
    identity = load_identity(*authority.files("brief", valid=(-DAY, DAY)))
    async with opened(authority.identity("gateway"), role="gateway") as one, opened(identity) as two:
        await two.connect(one.addresses[0])
        with one.events.follow(PeerRejected) as events:
            one._certificates._clock = lambda: identity.certificate.not_after + 1
            refused = await next_event(events, PeerRejected)
        assert (refused.peer, refused.reason) == (identity.peer_id, "expired")
        await until(lambda: not one.connected_peers())


async def test_peers_of_a_ca_removed_from_the_trust_bundle_are_disconnected(
    authority: Any, foreign_authority: Any
) -> None:
    gateway, leaf = authority.identity("gateway"), authority.identity("leaf")
    stranger = foreign_authority.identity("stranger")
    both = authority.org.pem() + authority.root.pem() + foreign_authority.org.pem() + foreign_authority.root.pem()
    for identity in (gateway, stranger):
        identity.trust_pem.write_bytes(both)
    gateway = load_identity(gateway.cert_pem, gateway.key_pem, gateway.trust_pem)
    stranger = load_identity(stranger.cert_pem, stranger.key_pem, stranger.trust_pem)
    async with opened(gateway, role="gateway") as one, opened(stranger) as two, opened(leaf) as three:
        for node in (two, three):
            await node.connect(one.addresses[0])
        gateway.trust_pem.write_bytes(authority.org.pem() + authority.root.pem())
        await until(lambda: two.peer_id not in one.connected_peers())
        assert three.peer_id in one.connected_peers()


async def test_a_node_logs_that_its_own_certificate_is_revoked(authority: Any, caplog: Any) -> None:
    crls = authority.revocations()
    own = load_identity(*authority.files("gateway"), crls)
    async with opened(own, role="gateway"):
        authority.revocations(own.certificate.serial)
        await until(lambda: "peers refuse this node" in caplog.text)
    assert "have a new certificate issued for its key" in caplog.text


# --------------------------------------------------------------------------------------------------------- chain checks


def test_a_revocation_list_signed_by_another_key_is_ignored(authority: Any, tmp_path: Path) -> None:
    leaf = authority.identity("leaf")
    forger = type(authority)(tmp_path / "forger", authority.name)  # its CAs have the same names
    crls = forger.revocations(leaf.certificate.serial)
    trust = CertificateVerifier(load_identity(*authority.files("judge"), crls))
    chain = build_chain((*leaf.chain, authority.root.certificate))
    assert trust.check(chain, leaf.certificate.not_before + 1) is None
    genuine = CertificateVerifier(
        load_identity(*authority.files("judge"), authority.revocations(leaf.certificate.serial))
    )
    verdict = genuine.check(chain, leaf.certificate.not_before + 1)
    assert verdict is not None
    assert verdict.reason == "revoked"


def test_certificates_of_a_revoked_intermediate_are_rejected(authority: Any) -> None:
    leaf = authority.identity("leaf")
    crls = authority.revocations(of_root=(authority.org.certificate.serial_number,))
    trust = CertificateVerifier(load_identity(*authority.files("judge"), crls))
    verdict = trust.check(build_chain(leaf.chain), leaf.certificate.not_before + 1)
    assert verdict is not None
    assert (verdict.reason, "acme root" in verdict.detail) == ("revoked", True)


def test_expiry_of_certificates_and_lists_is_logged_in_advance_and_again(authority: Any, caplog: Any) -> None:
    identity = load_identity(*authority.files("node"), authority.revocations())
    trust, warnings = CertificateVerifier(identity), ExpiryWarnings()
    end = identity.certificate.not_after
    for before in (20 * 86400.0, *(limit - 1 for limit in WARN_AT for _ in range(3))):
        warnings.log_due(trust, end - before)
    lines = [
        record for record in caplog.records if f"cert_pem {identity.cert_pem}: certificate 'node'" in record.message
    ]
    assert len(lines) == len(WARN_AT)
    assert [record.levelno for record in lines] == [logging.WARNING] * (len(WARN_AT) - 1) + [logging.ERROR]
    assert "have it renewed for the same key" in lines[0].message
    assert "the revocation list of 'acme org'" in caplog.text
    assert os.fspath(identity.crls_pem or "") in caplog.text


def version_two(key: Ed25519PrivateKey) -> bytes:
    """Encode a key as the Rust tool does: PKCS#8 version 2, with the public key appended."""
    seed = bytes.fromhex("020101300506032b657004220420") + key.private_bytes_raw()
    body = seed + bytes.fromhex("812100") + key.public_key().public_bytes_raw()
    der = b"\x30" + bytes([len(body)]) + body
    return b"-----BEGIN PRIVATE KEY-----\n" + base64.encodebytes(der) + b"-----END PRIVATE KEY-----\n"


def test_an_identity_has_peer_id_role_and_expiry(authority: Any) -> None:
    identity = load_identity(*authority.files("w1", "worker"))
    assert str(identity.peer_id).startswith("12D3KooW")
    assert (identity.certificate.subject, identity.certificate.role) == ("w1", "worker")
    assert identity.certificate.not_after > identity.certificate.not_before
    assert "PRIVATE" not in repr(identity)


def test_a_key_in_the_rust_tools_format_gives_the_same_identity(authority: Any) -> None:
    cert, key, trust = authority.files("w1")
    plain = load_identity(cert, key, trust)
    key.write_bytes(version_two(plain.key))
    with pytest.raises(ValueError, match=r"."):
        ser.load_pem_private_key(key.read_bytes(), None)
    rust = load_identity(cert, key, trust)
    assert rust.peer_id == plain.peer_id
    assert rust.client_context().verify_mode is ssl.CERT_REQUIRED


def test_contexts_speak_tls_1_3_with_certificates_on_both_sides(authority: Any) -> None:
    identity = load_identity(*authority.files("w1"))
    for context in (identity.client_context(), identity.server_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert not context.check_hostname
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert identity.server_context().num_tickets == 0


@pytest.mark.parametrize(("index", "name"), [(0, "cert_pem"), (1, "key_pem"), (2, "trust_pem")])
def test_a_missing_file_is_named_with_its_configuration_key(authority: Any, index: int, name: str) -> None:
    files = authority.files("w1")
    files[index].unlink()
    with pytest.raises(IdentityError, match=f"{name} .*{files[index].name}"):
        load_identity(*files)


def test_a_key_of_another_user_is_named_with_the_remedy(authority: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = authority.files("w1")

    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(IdentityError, match=rf"cannot be read: Permission denied; .* uid {os.geteuid()} \(chown\)"):
        load_identity(*files)


def test_another_kind_of_key_is_refused(authority: Any) -> None:
    cert, key, trust = authority.files("w1")
    other = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(other.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption()))
    with pytest.raises(IdentityError, match="Ed25519"):
        load_identity(cert, key, trust)


def test_malformed_files_are_refused_with_their_name(authority: Any, tmp_path: Path) -> None:
    cert, key, trust = authority.files("w1")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_bytes(b"no PEM")
    for files, name in (((rubbish, key, trust), "cert_pem"), ((cert, rubbish, trust), "key_pem")):
        with pytest.raises(IdentityError, match=f"{name} .*rubbish"):
            load_identity(*files)
    with pytest.raises(IdentityError, match=r"crls_pem .*rubbish"):
        load_identity(cert, key, trust, rubbish)


def test_a_key_readable_by_other_users_is_logged_as_a_warning(authority: Any, caplog: pytest.LogCaptureFixture) -> None:
    files = authority.files("w1")
    files[1].chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load_identity(*files)
    assert "chmod 600" in caplog.text


def test_the_key_is_left_neither_on_disk_nor_open(authority: Any) -> None:
    identity = load_identity(*authority.files("w1"))
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    identity.server_context()
    after = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    assert after == before
