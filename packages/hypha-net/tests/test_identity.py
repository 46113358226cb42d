"""Loading of identities: accepted and refused files; errors name file and remedy."""

from __future__ import annotations

import base64
import datetime as dt
import logging
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hypha_net.errors import IdentityError
from hypha_net.identity import load_identity

DAY = dt.timedelta(days=1)


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


def test_a_key_that_does_not_match_the_certificate_is_refused(authority: Any) -> None:
    cert, _, trust = authority.files("w1")
    _, key, _ = authority.files("w2")
    with pytest.raises(IdentityError, match="does not belong"):
        load_identity(cert, key, trust)


@pytest.mark.parametrize(("valid", "words"), [((-10 * DAY, -DAY), "expired"), ((DAY, 10 * DAY), "not valid before")])
def test_a_certificate_outside_its_validity_is_refused(
    authority: Any, valid: tuple[dt.timedelta, dt.timedelta], words: str
) -> None:
    with pytest.raises(IdentityError, match=words):
        load_identity(*authority.files("w1", valid=valid))


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
