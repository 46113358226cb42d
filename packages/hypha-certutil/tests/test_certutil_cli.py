"""Commands of hypha-certutil: files, permissions, errors, and certificates that TLS accepts."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from hypha_certutil.cli import main

Paths = dict[str, Path]


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def shown(*args: object) -> dict[str, object]:
    result = run(*args, "--format", "json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / "ca"
    shown("root", "--dir", folder)
    shown("org", "--dir", folder)
    return folder


def context(folder: Path, name: str, *, server: bool, crls: bool = False) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_cert_chain(folder / f"{name}-cert.pem", folder / f"{name}-key.pem")
    made.load_verify_locations(folder / f"{name}-trust.pem")
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    if crls:
        made.load_verify_locations(folder / "crls.pem")
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    return made


def handshake(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> None:
    """Run a mutual TLS handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname="0.0.0.0")
    server = server_context.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    for _ in range(6):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting


def test_tls_handshake_succeeds_with_and_without_revocation_lists(authority: Path) -> None:
    for name in ("alice", "bob"):
        shown("node", name, "--role", "worker", "--dir", authority)
    for crls in (False, True):
        client = context(authority, "alice", server=False, crls=crls)
        client.check_hostname = True  # for the IP address 0.0.0.0, as rustls does
        handshake(client, context(authority, "bob", server=True, crls=crls))


def test_only_the_revoked_node_is_refused(authority: Path) -> None:
    for name in ("alice", "bob", "carol"):
        shown("node", name, "--dir", authority)
    result = shown("revoke", authority / "bob-cert.pem", "--dir", authority)
    assert result["revoked"] == ["bob"]
    assert result["on_list"] == 1
    client = context(authority, "alice", server=False, crls=True)
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        handshake(client, context(authority, "bob", server=True))
    handshake(client, context(authority, "carol", server=True))
    shown("revoke", authority / "carol-cert.pem", "--dir", authority)
    assert shown("revoke", "--dir", authority)["on_list"] == 2  # a renewed list keeps all entries


def test_nodes_of_a_revoked_organisation_are_refused(authority: Path) -> None:
    for name in ("alice", "bob"):
        shown("node", name, "--dir", authority)
    shown("revoke", authority / "org-cert.pem", "--ca", "root", "--dir", authority)
    with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
        handshake(context(authority, "alice", server=False, crls=True), context(authority, "bob", server=True))


def test_renewed_certificate_keeps_the_identity(authority: Path) -> None:
    before = shown("node", "alice", "--role", "worker", "--days", "30", "--dir", authority)
    shown("node", "bob", "--dir", authority)
    cert = authority / "alice-cert.pem"
    old = cert.read_bytes()
    after = shown("renew", cert, "--dir", authority, "--days", "300")
    assert after["peer_id"] == before["peer_id"]
    assert after["role"] == "worker"
    assert str(after["not_after"]) > str(before["not_after"])
    assert old.startswith(Path(str(after["old"])).read_bytes())
    handshake(context(authority, "alice", server=False), context(authority, "bob", server=True))
    shown("revoke", *sorted(authority.glob("alice-cert*.pem")), "--dir", authority)
    with pytest.raises(ssl.SSLError, match="revoked"):
        handshake(context(authority, "alice", server=False), context(authority, "bob", server=True, crls=True))
    refused = run("renew", cert, "--dir", authority)
    assert refused.exit_code == 1
    assert "has been revoked: create the node again" in refused.output


def test_node_of_another_network_is_refused(authority: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shown("root", "--dir", other)
    shown("org", "--dir", other)
    shown("node", "alice", "--dir", authority)
    shown("node", "mallory", "--dir", other)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context(authority, "alice", server=False), context(other, "mallory", server=True))
    refused = run("revoke", other / "mallory-cert.pem", "--dir", authority)
    assert refused.exit_code == 1
    assert "was not issued by 'org'" in refused.stderr


def test_certificate_names_peer_id_and_role(authority: Path) -> None:
    result = shown("node", "alice", "--role", "scheduler", "--days", 7, "--dir", authority)
    chain = x509.load_pem_x509_certificates((authority / "alice-cert.pem").read_bytes())
    trust = x509.load_pem_x509_certificates((authority / "alice-trust.pem").read_bytes())
    assert [c.subject.rfc4514_string() for c in chain] == ["CN=alice", "CN=org"]
    assert [c.subject.rfc4514_string() for c in trust] == ["CN=org", "CN=root"]
    names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["0.0.0.0"]
    assert names.get_values_for_type(x509.DNSName) == ["alice"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["hypha://role/scheduler"]
    assert str(result["peer_id"]).startswith("12D3KooW")
    assert len(str(result["peer_id"])) == 52
    assert (chain[0].not_valid_after_utc - chain[0].not_valid_before_utc).days == 7


def test_keys_are_pkcs8_version_1_and_readable_by_the_owner_only(authority: Path) -> None:
    shown("node", "alice", "--dir", authority)
    for name in ("root", "org", "alice"):
        path = authority / f"{name}-key.pem"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = load_pem_private_key(path.read_bytes(), None)
        der = ssl.PEM_cert_to_DER_cert(path.read_text().replace("PRIVATE KEY", "CERTIFICATE"))
        assert len(der) == 48
        assert der[2:5] == b"\x02\x01\x00"  # INTEGER 0: version 1
        assert key is not None


@pytest.mark.parametrize("command", [["root"], ["org"], ["node", "alice"]])
def test_existing_files_are_not_overwritten_without_force(authority: Path, command: list[str]) -> None:
    shown("node", "alice", "--dir", authority)
    before = {path: path.read_bytes() for path in authority.iterdir()}
    refused = run(*command, "--dir", authority)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert {path: path.read_bytes() for path in authority.iterdir()} == before
    key = authority / f"{command[-1]}-key.pem"
    key.chmod(0o644)
    shown(*command, "--force", "--dir", authority)
    assert key.read_bytes() != before[key]
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_request_is_signed_without_moving_the_key(authority: Path, tmp_path: Path) -> None:
    shown("node", "bob", "--dir", authority)
    made = shown("request", "alice", "--role", "worker", "--out", tmp_path / "node")
    request = tmp_path / "node" / "alice-request.pem"
    refused = run("sign", request, "--dir", authority)
    assert refused.exit_code == 1
    assert "--role worker" in refused.stderr
    signed = shown("sign", request, "--role", "worker", "--dir", authority, "--out", tmp_path / "node")
    assert signed["peer_id"] == made["peer_id"]
    assert signed["role"] == "worker"
    assert not (authority / "alice-key.pem").exists()
    handshake(context(tmp_path / "node", "alice", server=False), context(authority, "bob", server=True))


def test_tampered_request_is_refused(authority: Path, tmp_path: Path) -> None:
    shown("request", "alice", "--out", tmp_path)
    path = tmp_path / "alice-request.pem"
    der = bytearray(ssl.PEM_cert_to_DER_cert(path.read_text().replace("CERTIFICATE REQUEST", "CERTIFICATE")))
    der[der.index(b"alice")] ^= 1
    path.write_text(ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST"))
    refused = run("sign", path, "--dir", authority)
    assert refused.exit_code == 1
    assert "signature" in refused.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["node", "alice", "--days", "9999"], "outlives 'org'"),
        (["node", "../alice"], "name '../alice'"),
        (["node", "alice", "--org", "root"], "is a root"),
        (["node", "alice", "--org", "nobody"], "nobody-key.pem: no CA 'nobody' is in this folder"),
        (["org", "second", "--root", "org"], "is not a root"),
    ],
)
def test_errors_are_reported_in_one_line(authority: Path, command: list[str], says: str) -> None:
    refused = run(*command, "--dir", authority)
    assert refused.exit_code == 1
    assert says in refused.stderr
    assert "Traceback" not in refused.output


def test_text_output_names_the_peer_id(authority: Path) -> None:
    result = run("node", "alice", "--dir", authority)
    assert "peer id      12D3KooW" in result.stdout


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text()
    commands = [line.split() for block in text.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    assert len(commands) == 6
    for command in commands:
        assert command[0] == "hypha-certutil"
        shown(*command[1:])
    shown("revoke", "certs/worker-1-cert.pem", "--dir", "certs")
