"""Certificates of a running gateway process: renewed, revoked or unusable files, by the commands of the docs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest
from support.loopback_ports import free_port

from hypha_net import EndpointSettings, open_endpoint
from hypha_net.errors import RefusedError
from hypha_net.identity import load_identity

REVOKED_WITHIN = 60.0
"""Seconds after a change of the revocation list within which a revoked peer is disconnected."""


def script(name: str) -> str:
    """Return the path of a console script of this environment."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found is not None, f"{name} is not installed beside {sys.executable}"
    return found


def certutil(*args: object) -> None:
    done = subprocess.run([script("hypha-certutil"), *map(str, args)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


class Gateway:
    """Process of `hypha-gateway run`, with its address and log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"/ip4/127.0.0.1/tcp/{free_port()}"
        self.log = folder / "gateway.log"
        (folder / "gateway.toml").write_text(
            'cert_pem = "gateway-cert.pem"\nkey_pem = "gateway-key.pem"\ntrust_pem = "gateway-trust.pem"\n'
            f'crls_pem = "crls.pem"\nexclude_cidr = []\nlisten_addresses = ["{self.address}"]\n'
        )
        self.process = subprocess.Popen(self.command(), stderr=self.log.open("w"))
        self.wait_for("ready")

    def command(self) -> list[str]:
        return [script("hypha-gateway"), "run", "--config", str(self.folder / "gateway.toml")]

    def wait_for(self, words: str, seconds: float = 30, times: int = 1) -> None:
        """Wait until the log contains a text a number of times."""
        end = time.monotonic() + seconds
        while self.log.read_text().count(words) < times:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"no {words!r} within {seconds:g} s:\n{self.log.read_text()}"
            time.sleep(0.05)

    def probe(self) -> dict[str, object]:
        """Return the result of a probe with a worker's certificate."""
        parts = [f"--set={kind}_pem={self.folder}/prober-{kind}.pem" for kind in ("cert", "key", "trust")]
        command = [script("hypha-gateway"), "probe", self.address, *parts, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    for authority in ("root", "org"):
        certutil(authority, "--dir", tmp_path)
    certutil("node", "gateway", "--role", "gateway", "--days", "100", "--dir", tmp_path)
    certutil("node", "prober", "--role", "worker", "--dir", tmp_path)
    made = Gateway(tmp_path)
    try:
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(60) == 0
        assert "Traceback" not in made.log.read_text()
    finally:
        made.process.kill()
        made.process.wait()


def run(main: Callable[[], Awaitable[None]], limit: float) -> None:
    async def bounded() -> None:
        with anyio.fail_after(limit):
            await main()

    anyio.run(bounded, backend="trio")


@pytest.mark.nightly
def test_renewed_certificate_is_loaded_on_sighup_and_automatically(gateway: Gateway) -> None:
    before = gateway.probe()
    certutil("renew", gateway.folder / "gateway-cert.pem", "--days", "200", "--dir", gateway.folder)
    gateway.process.send_signal(signal.SIGHUP)
    gateway.wait_for("certificates reloaded", 4.5)  # sooner than its own check interval
    after = gateway.probe()
    assert after["peer_id"] == before["peer_id"]
    assert str(after["certificate_end"]) > str(before["certificate_end"])
    certutil("renew", gateway.folder / "gateway-cert.pem", "--days", "300", "--dir", gateway.folder)
    gateway.wait_for("certificates reloaded", REVOKED_WITHIN, times=2)
    assert str(gateway.probe()["certificate_end"]) > str(after["certificate_end"])


@pytest.mark.nightly
def test_sighup_with_unusable_files_keeps_the_old_certificates(gateway: Gateway) -> None:
    trust = gateway.folder / "gateway-trust.pem"
    whole = trust.read_bytes()
    trust.write_bytes(whole[:40])
    gateway.process.send_signal(signal.SIGHUP)
    gateway.wait_for("are not reloaded")
    assert f"trust_pem {trust}" in gateway.log.read_text()
    assert gateway.probe()["healthy"] is True
    certutil("node", "gateway", "--role", "gateway", "--force", "--dir", gateway.folder)  # another key
    gateway.process.send_signal(signal.SIGHUP)
    gateway.wait_for("restart the node to use it")
    assert gateway.probe()["healthy"] is True


@pytest.mark.nightly
def test_revoked_node_is_disconnected_within_a_minute(gateway: Gateway) -> None:
    certutil("node", "leaving", "--role", "worker", "--dir", gateway.folder)
    files = [gateway.folder / f"leaving-{kind}.pem" for kind in ("cert", "key", "trust")]

    async def main() -> None:
        settings = EndpointSettings(gateway_addresses=(gateway.address,))
        async with open_endpoint(load_identity(*files), settings) as node:
            await node.wait_for_gateway(10)
            with anyio.fail_after(10):
                while not node.addresses:  # its reservation at the relay
                    await anyio.sleep(0.05)
            await anyio.to_thread.run_sync(certutil, "revoke", files[0], "--dir", gateway.folder)
            with anyio.fail_after(REVOKED_WITHIN):
                while node.connected_peers():
                    await anyio.sleep(0.05)
            assert not node.addresses
            with pytest.raises(RefusedError, match="ours is revoked: ask the organisation for a new one"):
                await node.connect(gateway.address)

    run(main, REVOKED_WITHIN + 40)
    gateway.wait_for("certificate 'leaving'")
    assert gateway.probe()["healthy"] is True
