"""Certificates of one run: a root CA, an organization CA, and a certificate for every node and for this process.

The CA keys exist only in memory, so no node can be added to the network after the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from hypha_certutil.authority import Authority, make_node, make_org, make_root
from hypha_certutil.storage import PRIVATE, Output, bundle_pem, key_pem, names_in, write_all
from hypha_local.network_layout import NodePlan
from hypha_proto.ids import PeerId

DAYS: Final = 30
OWN_NAME: Final = "local"


def write_certificates(folder: Path, nodes: Iterable[NodePlan]) -> Path:
    """Write certificate, key and trust bundle of every node to `folder`.

    Returns:
        The path prefix of this process's own identity: ``<prefix>-cert.pem`` and so on.
    """
    now = datetime.now(UTC)
    root = make_root("hypha-local-root", _key(), days=DAYS + 2, now=now)
    org = make_org("hypha-local", _key(), root, days=DAYS + 1, now=now)
    for node in nodes:
        _write(folder, node.name, node.role, org, now)
    _write(folder, OWN_NAME, None, org, now)
    return folder / OWN_NAME


def peer_names(folder: Path, nodes: Iterable[NodePlan]) -> dict[str, str]:
    """Return the names of the nodes by their peer ids, from the certificates in `folder`."""
    return {str(_peer_id(names_in(folder, node.name).certificate)): node.name for node in nodes}


def _peer_id(certificate: Path) -> PeerId:
    key = load_pem_x509_certificate(certificate.read_bytes()).public_key()
    return PeerId.from_public_key(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def _write(folder: Path, name: str, role: str | None, org: Authority, now: datetime) -> None:
    key = _key()
    certificate = make_node(name, key.public_key(), org, role=role, days=DAYS, now=now)
    names = names_in(folder, name)
    outputs = [
        Output(names.certificate, bundle_pem((certificate, *org.intermediates))),
        Output(names.key, key_pem(key), PRIVATE),
        Output(names.trust, bundle_pem(org.trust)),
    ]
    write_all(outputs, force=True)
