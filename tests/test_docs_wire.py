"""docs/wire.md names every protocol that a node serves; docs/gateway.md names only existing tests."""

from __future__ import annotations

import re
from pathlib import Path

import anyio

from hypha_local.certificates import write_certificates
from hypha_net import EndpointSettings, open_endpoint
from hypha_net.identity import load_identity
from hypha_proto import protocols

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(/[a-z0-9-]+/[a-z0-9./-]*)`")


def table(page: str) -> set[str]:
    """Return the protocol ids in the first column of a page's tables."""
    rows = re.findall(r"^\| (`/.*?) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in NAMED.findall(row)}


async def test_every_served_protocol_is_in_the_table(tmp_path: Path) -> None:
    spoken: set[str] = set()
    prefix = write_certificates(tmp_path, [])
    identity = load_identity(*(prefix.with_name(f"local-{kind}.pem") for kind in ("cert", "key", "trust")))
    for role in ("gateway", "node"):
        settings = EndpointSettings(listen_addresses=("/ip4/127.0.0.1/tcp/0",), role=role)  # type: ignore[arg-type]
        with anyio.fail_after(20):
            async with open_endpoint(identity, settings) as node:
                spoken.update(str(name) for name in node._host.get_mux().get_protocols() if name)
    ours = {value for value in vars(protocols).values() if isinstance(value, str) and value.startswith("/hypha")}
    assert {"/ipfs/kad/1.0.0", "/libp2p/dcutr"} <= spoken
    assert spoken | ours - {protocols.IDENTIFY_VERSION} <= table("wire.md")


def test_tests_named_by_the_gateway_page_exist() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tests/test_*.py")]
    defined = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
    there = {name for file in files for name in defined.findall(file.read_text())}
    assert len(named) > 30
    assert named - there == set()
