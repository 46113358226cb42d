"""Gateway process: configured by init, started, probed and ended, over real TLS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hypha_gateway.cli import main
from hypha_gateway.config import GatewayConfig
from hypha_net.node.config.errors import ConfigError
from hypha_net.node.config.loader import load_config
from hypha_net.node.lifecycle import endpoint_settings
from hypha_net.settings import RelayLimits


def script(name: str) -> str:
    """Return the path of a console script of this environment."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found is not None, f"{name} is not installed beside {sys.executable}"
    return found


def run(*args: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(arg) for arg in args], capture_output=True, text=True, timeout=timeout, check=False)


def make_node(folder: Path, name: str, role: str) -> None:
    done = run(script("hypha-certutil"), "node", name, "--role", role, "--dir", folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the certificates of a network and the gateway's configuration by init."""
    made = tmp_path_factory.mktemp("gateway")
    for authority in ("root", "org"):
        assert run(script("hypha-certutil"), authority, "--dir", made).returncode == 0
    make_node(made, "gateway", "gateway")
    make_node(made, "prober", "worker")
    assert run(script("hypha-gateway"), "init", "--lan", "--out", made / "gateway.toml").returncode == 0
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Run a gateway; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}"
    command = [script("hypha-gateway"), "run", "--config", str(folder / "gateway.toml")]
    log = (folder / "gateway.log").open("w")
    process = subprocess.Popen([*command, "--set", f"listen_addresses={address}"], stderr=log)
    try:
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()
    text = (folder / "gateway.log").read_text()
    assert "Traceback" not in text
    assert text.rstrip().endswith("ended")


def probe(folder: Path, name: str, address: str, *more: str) -> subprocess.CompletedProcess[str]:
    parts = [item for kind in ("cert", "key", "trust") for item in ("--set", f"{kind}_pem={folder}/{name}-{kind}.pem")]
    return run(script("hypha-gateway"), "probe", address, *parts, *more)


def wait_until_healthy(folder: Path, address: str) -> dict[str, object]:
    for _ in range(10):
        asked = probe(folder, "prober", address, "--format", "json")
        if asked.returncode == 0:
            return dict(json.loads(asked.stdout))
        assert asked.returncode in (1, 3), asked.stderr
    raise AssertionError(asked.stderr)


def test_probe_reports_the_identity_of_the_gateway(folder: Path, address: str) -> None:
    answer = wait_until_healthy(folder, address)
    assert str(answer["peer_id"]).startswith("12D3KooW")
    assert answer["role"] == "gateway"
    assert str(answer["agent"]).startswith("hypha-python/")
    assert str(answer["certificate_end"]).endswith("Z")
    named = probe(folder, "prober", f"{address}/p2p/{answer['peer_id']}")
    assert named.returncode == 0, named.stderr
    assert f"peer id          {answer['peer_id']}" in named.stdout
    assert "agent            hypha-python/" in probe(folder, "gateway", address).stdout  # its own certificate


def test_node_of_another_network_is_refused_with_a_reason(folder: Path, address: str, tmp_path: Path) -> None:
    wait_until_healthy(folder, address)
    for authority in ("root", "org"):
        assert run(script("hypha-certutil"), authority, "--dir", tmp_path).returncode == 0
    make_node(tmp_path, "stranger", "worker")
    refused = probe(tmp_path, "stranger", address)
    assert refused.returncode == 3
    assert "Traceback" not in refused.stderr
    assert "certificate" in refused.stderr


def test_unreachable_address_exits_with_code_3(folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    missed = probe(folder, "prober", f"/ip4/127.0.0.1/tcp/{port}", "--timeout", "3")
    assert missed.returncode == 3
    assert missed.stdout == ""


@pytest.mark.parametrize(
    ("moment", "number", "code"), [("the first line", signal.SIGINT, 130), ("ready", signal.SIGTERM, 0)]
)
def test_signal_at_any_time_ends_the_gateway_quietly(
    folder: Path, moment: str, number: signal.Signals, code: int
) -> None:
    """Use the command line without a command, and a configuration whose warning is logged before the imports."""
    env = {**os.environ, "HYPHA_LISTEN_ADDRESSES": "/ip4/127.0.0.1/tcp/0", "HYPHA_UNKNOWN": "1"}
    command = [script("hypha-gateway"), "--config", str(folder / "gateway.toml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr)
            assert "HYPHA_UNKNOWN" in next(lines)
            if moment == "ready":
                assert any("ready" in line for line in lines)
            process.send_signal(number)
            _, rest = process.communicate(timeout=60)
            assert process.returncode == code, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


def test_gateway_needs_no_gateway_address_and_refuses_relay_circuit(tmp_path: Path) -> None:
    flags = {f"{kind}_pem": "x" for kind in ("cert", "key", "trust")}
    config = load_config(GatewayConfig, None, {}, flags).config
    assert config.listen_addresses == ["/ip4/0.0.0.0/tcp/4001"]
    assert config.relay_circuit is False
    with pytest.raises(ConfigError, match="relay_circuit"):
        load_config(GatewayConfig, None, {}, {**flags, "relay_circuit": "true"})


def test_relay_limits_come_from_the_relay_table(tmp_path: Path) -> None:
    flags = {f"{kind}_pem": "x" for kind in ("cert", "key", "trust")}
    unset = load_config(GatewayConfig, None, {}, flags).config
    assert endpoint_settings(unset, "gateway").relay == RelayLimits()
    path = tmp_path / "gateway.toml"
    path.write_text(
        'cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\n[relay]\nmax_reservations = 8\nmax_circuits = 9\n'
        "max_circuits_per_peer = 3\nmax_bytes = 131072\nmax_duration = 120\nreservation_lifetime = 600\n"
    )
    told = load_config(GatewayConfig, path, {}, {}).config
    expected = RelayLimits(8, 9, 3, 131072, 120.0, 600.0)
    assert endpoint_settings(told, "gateway").relay == expected
    for wrong in ("max_bytes=0", "max_duration=0.5", "reservation_lifetime=1", "max_circuits_per_peer=0"):
        key, _, value = wrong.partition("=")
        with pytest.raises(ConfigError, match=f"relay.{key}"):
            load_config(GatewayConfig, path, {}, {f"relay.{key}": value})


def test_init_output_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    assert CliRunner().invoke(main, ["init", "--out", str(path)]).exit_code == 0
    checked = CliRunner().invoke(main, ["config", "show", "--config", str(path)])
    assert checked.exit_code == 0, checked.output
