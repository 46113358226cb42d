"""What a worker promises on machines as their owners have them, by real processes: the table in docs/owners.md.

A worker is usable when it says that it is ready, and says what is wrong when it is not.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.authority import DAY, Authority
from support.confined_runs import as_user
from support.task_network import TaskNetwork
from support.waiting import wait_until

from hypha_local.processes import script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(240)]

UID = 4242
"""A uid without a passwd entry."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_faketime = pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskNetwork]:
    """A network whose gateway runs, and two workers that do not."""
    planned = TaskNetwork(tmp_path_factory.mktemp("promises") / "run", workers=2, leases=1)
    try:
        planned.start("gateway")
        planned.wait_healthy("gateway")
        yield planned
    finally:
        planned.down()


def start(network: TaskNetwork, *wrapper: str, name: str = "worker-1") -> None:
    network.processes.start(
        name, [*wrapper, script("hypha-worker"), "run", "--config", str(network.configuration(name))]
    )


def change(network: TaskNetwork, pattern: str, replacement: str, name: str = "worker-1") -> None:
    path = network.configuration(name)
    text, count = re.subn(pattern, lambda _: replacement, path.read_text())
    assert count, text
    path.write_text(text)


def status(network: TaskNetwork, name: str = "worker-1") -> dict[str, Any]:
    """Return the status of a worker; empty if none runs there yet."""
    command = [script("hypha-worker"), "status", "--format", "json", "--config", str(network.configuration(name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def wait_for_reason(network: TaskNetwork, text: str, name: str = "worker-1") -> None:
    """Wait until a worker is not ready for a reason with a text."""
    wait_until(lambda: text in (status(network, name).get("reason") or ""), 120, text)


def wait_until_ready(network: TaskNetwork, name: str = "worker-1") -> dict[str, Any]:
    wait_until(lambda: status(network, name).get("ready", False), 60, f"{name} is ready")
    return status(network, name)


def probe(network: TaskNetwork, *wrapper: str) -> list[str]:
    """Return the lines of ``probe`` that are not ok."""
    command = [*wrapper, script("hypha-worker"), "probe", "--config", str(network.configuration("worker-1"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert (done.returncode == 1) is bool(failed), done
    return [line for line in done.stdout.splitlines() if not line.startswith("ok ")]


def has_line(lines: Sequence[str], *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in lines)


def test_a_wrong_gateway_port_is_named_with_its_cause(network: TaskNetwork) -> None:
    change(network, r"gateway_addresses = .*", 'gateway_addresses = ["/ip4/127.0.0.1/tcp/1"]')
    start(network)
    wait_for_reason(network, "0 of 1 gateways: /ip4/127.0.0.1/tcp/1: ")
    assert "Connection refused" in status(network)["reason"]
    assert has_line(probe(network), "FAILED", "/ip4/127.0.0.1/tcp/1", "Connection refused")


@needs_faketime
def test_a_worker_that_a_gateway_with_a_late_clock_refuses_is_not_ready(network: TaskNetwork) -> None:
    authority = Authority(network.folders.certificates)
    authority.files("gateway", "gateway")
    authority.files("worker-1", "worker", valid=(-dt.timedelta(hours=1), DAY))
    network.stop_child(network.processes.child("gateway"))
    late = ["faketime", "-f", "-12h", script("hypha-gateway"), "run", "--config", str(network.configuration("gateway"))]
    network.processes.start("gateway", late)
    start(network)
    wait_for_reason(network, "check the clocks of both nodes")
    assert "0 of 1 gateways: " in status(network)["reason"]
    assert has_line(probe(network), "FAILED", "gateway_addresses[0]", "check the clocks of both nodes")


@needs_root
def test_a_worker_of_a_uid_without_name_and_home_runs_executors(network: TaskNetwork) -> None:
    work = network.folders.work / "worker-1"
    work.mkdir(parents=True, exist_ok=True)
    for path in (work, *network.folders.certificates.glob("worker-1-*")):
        os.chown(path, UID, UID)
    for folder in (work.parent, network.folders.certificates):
        folder.chmod(0o755)
    change(network, 'name = "python"', 'name = "python"\ncheck = ["/bin/sh", "-c", "test ! -w /"]')
    command = [script("hypha-worker"), "run", "--config", str(network.configuration("worker-1"))]
    homeless = ["env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME"]
    network.processes.start("worker-1", [*homeless, *as_user(command, [network.folders.root], UID)])
    assert wait_until_ready(network)["excluded"] == []
    network.start("data")
    network.start("scheduler")
    network.wait_healthy("scheduler")
    job = network.submit([{"name": "t", "driver": {"shell/python": {"code": "import os; assert os.getuid() != 0"}}}])
    job.wait(60)


@pytest.mark.gate
def test_an_executor_that_cannot_start_is_not_offered(network: TaskNetwork) -> None:
    change(network, r'cmd = ".*"', 'cmd = "/nowhere/python"')
    start(network)
    wait_for_reason(network, "no executor can be offered: shell/python: its command '/nowhere/python' is not found")
    assert {each["executor"] for each in status(network)["excluded"]} == {"shell/python", "shell/pass"}
    assert has_line(probe(network), "FAILED", "'/nowhere/python' is not found", "install it")


def test_of_two_nodes_with_one_certificate_the_second_is_told(network: TaskNetwork) -> None:
    change(network, r"certs/worker-2-", "certs/worker-1-", "worker-2")
    start(network)
    wait_until_ready(network)
    start(network, name="worker-2")
    address = f"{network.nodes['worker-1'].port}"
    wait_for_reason(network, f"/tcp/{address}/", "worker-2")
    assert "uses the same certificate" in status(network, "worker-2")["reason"]
    assert status(network)["ready"]
    wait_until(lambda: "two nodes use the certificate" in network.log("gateway"), 60, "the gateway's warning")


def test_a_worker_with_64_open_files_runs_executors_and_logs_little(network: TaskNetwork) -> None:
    limited = ["/bin/sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    start(network, *limited)
    found = wait_until_ready(network)
    assert (found["open_files"], found["excluded"]) == (64, [])
    assert has_line(probe(network, *limited), "warning", "ulimit -n: at most 64", "ulimit -n 1024")
    assert "Traceback" not in network.log("worker-1")
    assert len(network.log("worker-1").splitlines()) < 100


def test_an_expired_certificate_fails_the_check_as_it_fails_the_run(network: TaskNetwork) -> None:
    Authority(network.folders.certificates).files("worker-1", "worker", valid=(-2 * DAY, -DAY))
    command = [script("hypha-worker"), "run", "--config", str(network.configuration("worker-1"))]
    for words in (command, [*command, "--check"]):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "worker-1-cert.pem expired on " in done.stderr
    assert has_line(probe(network), "FAILED", "worker-1-cert.pem expired on ", "hypha-certutil renew")
