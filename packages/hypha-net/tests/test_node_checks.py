"""Checks of certificates, ports and folders, on real files and sockets; and ``probe`` of the own node."""

from __future__ import annotations

import datetime as dt
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.authority import DAY, Authority

from hypha_net.node.checks import Check, check_folder, check_gateways, check_identity, check_listen
from hypha_net.node.cli import Program
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.lifecycle import Node


def config(files: tuple[Path, Path, Path], crls: Path | None = None) -> NodeConfig:
    cert, key, trust = files
    gateways = ["/ip4/127.0.0.1/tcp/9"]
    return NodeConfig(cert_pem=cert, key_pem=key, trust_pem=trust, crls_pem=crls, gateway_addresses=gateways)


def failures(found: list[Check]) -> list[str]:
    return [check.text for check in found if check.state == "FAILED"]


def test_good_files_pass(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("node", role="worker")
    found = list(check_identity(config(files, authority.revocations()), "worker"))
    assert {check.state for check in found} == {"ok"}, found


@pytest.mark.parametrize(
    ("valid", "told"),
    [((-2 * DAY, -DAY), "expired on"), ((DAY, 2 * DAY), "is not valid before")],
    ids=["expired", "not yet valid"],
)
def test_a_certificate_outside_its_time_fails(
    tmp_path: Path, valid: tuple[dt.timedelta, dt.timedelta], told: str
) -> None:
    cert, key, trust = Authority(tmp_path).files("node", valid=valid)
    [text] = failures(list(check_identity(config((cert, key, trust)), "worker")))
    assert text.startswith(f"cert_pem {cert}")
    assert told in text
    [gateways] = check_gateways(config((cert, key, trust)), "worker", 5)
    assert gateways.state == "warning"
    assert gateways.text.startswith("gateway_addresses")


def test_a_certificate_that_expires_soon_is_a_warning(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("node", valid=(-DAY, 5 * DAY))
    found = list(check_identity(config(files), "worker"))
    [soon] = [check for check in found if check.state == "warning"]
    assert "have it renewed" in soon.text
    assert not failures(found)


def test_files_that_do_not_belong_together_fail(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key, trust = authority.files("node")
    _, other, _ = authority.files("other")
    _, _, foreign = Authority(tmp_path / "b", "other").files("node")
    [text] = failures(list(check_identity(config((cert, other, trust)), "worker")))
    assert text.startswith(f"key_pem {other} does not belong to cert_pem {cert}")
    [text] = failures(list(check_identity(config((cert, key, foreign)), "worker")))
    assert text.startswith(f"trust_pem {foreign}")
    assert "does not verify" in text


def test_an_unreadable_revocation_list_and_a_revoked_certificate_fail(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.files("node")
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    [text] = failures(list(check_identity(config(files, broken), "worker")))
    assert text == f"crls_pem {broken} holds no PEM revocation list"
    from hypha_net.identity import load_identity

    serial = load_identity(*files).certificate.serial
    [text] = failures(list(check_identity(config(files, authority.revocations(serial)), "worker")))
    assert "certificate revoked" in text


def test_the_role_of_another_program_is_a_warning(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("node", role="data")
    [told] = [check for check in check_identity(config(files), "worker") if check.state == "warning"]
    assert "--role worker" in told.text


def test_a_taken_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        found, while_running = (check_listen("listen_addresses[0]", address, live=live) for live in (False, True))
    assert (found.state, while_running.state) == ("FAILED", "warning")
    assert f"listen_addresses[0] = '{address}'" in found.text
    assert "choose another port" in found.text
    assert check_listen("listen_addresses[0]", "/ip4/127.0.0.1/tcp/0").state == "ok"


def test_a_file_in_place_of_a_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        [found] = check_folder("work_dir", folder)
        assert found.state == "FAILED"
        assert found.text.startswith(f"work_dir {folder}: cannot be written: ")
    assert "can be made" in next(iter(check_folder("work_dir", tmp_path / "a" / "b"))).text
    assert not (tmp_path / "a").exists()
    assert "can be written" in next(iter(check_folder("work_dir", tmp_path))).text
    assert os.listdir(tmp_path) == ["file"]


async def serve(_config: NodeConfig, _node: Node) -> None:
    raise AssertionError("probe runs no program")


def test_probe_names_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    Authority(tmp_path).files("worker")
    main = Program("hypha-net", lambda: NodeConfig, serve, role="worker").cli()
    file = tmp_path / "worker.toml"
    assert CliRunner().invoke(main, ["init", "--out", str(file)]).exit_code == 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"/ip4/127.0.0.1/tcp/{unused.getsockname()[1]}"
        setting = f'gateway_addresses=["{address}"]'
        done = CliRunner().invoke(main, ["probe", "--config", str(file), "--set", setting])
    assert done.exit_code == 1, done.output
    *passed, line, last = done.stdout.splitlines()
    assert all(each.startswith("ok ") for each in passed)
    assert line.startswith(f"FAILED   gateway_addresses[0] = '{address}': ")
    assert last == f"1 of {len(passed) + 1} checks failed, 0 warned"
