"""Runs the shell blocks of the user's documents. Each test names what it replaces; `docs/blocks.md` lists them all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.doc_snippets import block, completed_scheduler, completed_worker
from support.wheelhouse import empty_environment, packages, passed, quiet_environment, release_site, run

from hypha_local.certificates import write_certificates
from hypha_local.network_layout import NodePlan, free_ports
from hypha_local.processes import script

OTEL = {
    "telemetry_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "telemetry_headers": "OTEL_EXPORTER_OTLP_HEADERS",
    "telemetry_protocol": "OTEL_EXPORTER_OTLP_PROTOCOL",
}
KINDS = ("cert", "key", "trust")


def bash(text: str, folder: Path) -> str:
    """Run shell text with this tree's programs on PATH and /etc and /var replaced by folders in `folder`."""
    for place in ("/etc/hypha", "/var/hypha", "/path/to"):
        text = text.replace(place, f"{folder}{place}")
    path = os.pathsep.join([str(folder / "programs"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return passed(run(["bash", "-euc", text], env=quiet_environment(PATH=path), cwd=folder, timeout=60))


def shows_what_it_would_run(program: str, folder: Path) -> None:
    """Replace a daemon by a script that loads the configuration given to `run` and prints it."""
    (folder / "programs").mkdir()
    stand_in = folder / "programs" / program
    real = script(program)
    lines = ["#!/bin/sh", '[ "$1" = run ] && shift']
    stand_in.write_text("\n".join([*lines, f'exec {real} config show --format json "$@"\n']))
    stand_in.chmod(0o755)


@pytest.mark.parametrize("name", ["worker:16", "worker-older:44"])
def test_the_work_directory_is_made_as_a_worker_wants_it(name: str, tmp_path: Path) -> None:
    """Replaced: sudo, which runs the command directly."""
    bash('sudo() { "$@"; }\n' + block(name).text, tmp_path)
    work = tmp_path / "var" / "hypha" / "work"
    assert stat.S_IMODE(work.stat().st_mode) == 0o750
    assert work.owner() == Path(tmp_path).owner()


def test_the_environment_goes_over_the_file(tmp_path: Path) -> None:
    shows_what_it_would_run("hypha-worker", tmp_path)
    file = tmp_path / "etc" / "hypha" / "worker.toml"
    file.parent.mkdir(parents=True)
    file.write_text(completed_worker('work_dir = "/somewhere"\n'))
    shown = json.loads(bash(block("worker:95").text, tmp_path))
    for key, place in (
        ("cert_pem", "etc/hypha/certs/worker-cert.pem"),
        ("key_pem", "etc/hypha/certs/worker-key.pem"),
        ("work_dir", "var/hypha/work"),
    ):
        assert shown[key] == {"value": str(tmp_path / place), "origin": f"HYPHA_{key.upper()}"}
    assert shown["trust_pem"]["origin"].startswith(f"{file}:")


@pytest.mark.parametrize(("name", "program"), [("worker:86", "hypha-worker"), ("scheduler:174", "hypha-scheduler")])
def test_variables_of_opentelemetry_are_read(name: str, program: str, tmp_path: Path) -> None:
    shows_what_it_would_run(program, tmp_path)
    file = tmp_path / "etc" / "hypha" / f"{program.removeprefix('hypha-')}.toml"
    file.parent.mkdir(parents=True)
    telemetry = 'telemetry_endpoint = "http://elsewhere:4318"\n'
    file.write_text((completed_worker if program == "hypha-worker" else completed_scheduler)(telemetry))
    shown = json.loads(bash(block(name).text, tmp_path))
    for key, variable in OTEL.items():
        assert shown[key]["origin"] == variable
    assert shown["telemetry_endpoint"]["value"] == "https://otlp-gateway-prod-eu-west-2.grafana.net/otlp"
    assert shown["telemetry_headers"]["value"] == "***"
    service = shown["telemetry_attributes.service.name"]
    assert service == {"value": f"{program.removeprefix('hypha-')}-01", "origin": "OTEL_SERVICE_NAME"}
    assert shown["telemetry_attributes.deployment.environment"]["value"] == "prod"


@contextmanager
def daemon(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon while the context is open; it must exit with 0 on SIGTERM."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(15)
        finally:
            process.kill()
            process.wait()
    assert code == 0, log.read_text()


def healthy(program: str, address: str, config: Path, env: dict[str, str]) -> dict[str, object]:
    """Return the output of `probe` once the node is healthy, polled for at most half a minute."""
    ends = time.monotonic() + 30
    while True:
        command = [script(program), "probe", address, "--config", str(config), "--timeout", "5", "--format", "json"]
        done = run(command, env=env, timeout=30)
        if done.returncode == 0:
            answer: dict[str, object] = json.loads(done.stdout)
            return answer
        assert done.returncode in (1, 3), done.stderr
        assert time.monotonic() < ends, done.stdout + done.stderr
        time.sleep(0.3)


@pytest.mark.nightly
def test_the_complete_worker_starts_by_the_older_command_and_is_healthy(tmp_path: Path) -> None:
    """The file is verbatim that of the document. Replaced by HYPHA_* variables: the folders of certificates and jobs,
    the listen address (a known port, for the probe) and the gateway addresses (one here)."""
    ports = free_ports(2)
    gateway = NodePlan("gateway", "hypha-gateway", "gateway", ports[0])
    worker = NodePlan("worker", "hypha-worker", "worker", ports[1])
    certificates = tmp_path / "certs"
    certificates.mkdir()
    write_certificates(certificates, [gateway, worker])
    (tmp_path / "work").mkdir(mode=0o750)

    def variables(node: NodePlan, **more: str) -> dict[str, str]:
        own = {f"HYPHA_{kind.upper()}_PEM": str(certificates / f"{node.name}-{kind}.pem") for kind in KINDS}
        return quiet_environment(**own, HYPHA_LISTEN_ADDRESSES=node.address, **more)

    at_gateway = variables(gateway)
    at_worker = variables(worker, HYPHA_GATEWAY_ADDRESSES=gateway.address, HYPHA_WORK_DIR=str(tmp_path / "work"))
    file = tmp_path / "worker.toml"
    file.write_text(block("worker-older:175").text)
    words = block("worker-older:244").text.split()
    assert words == ["hypha-worker", "--config", "/path/to/config.toml"]
    empty = tmp_path / "gateway.toml"
    empty.write_text("")
    with (
        daemon([script("hypha-gateway"), "run", "--config", str(empty)], at_gateway, tmp_path / "gateway.log"),
        daemon([script("hypha-worker"), "--config", str(file)], at_worker, tmp_path / "worker.log"),
    ):
        answer = healthy("hypha-worker", worker.address, file, at_worker)
        assert (answer["healthy"], answer["role"]) == (True, "worker")
        assert str(answer["agent"]).startswith("hypha-python/")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(answer["certificate_end"]))
        assert str(answer["peer_id"]).startswith("12D3KooW")
        text = passed(run([script("hypha-worker"), "probe", gateway.address, "--config", str(file)], env=at_worker))
        for word in ("peer id", "healthy          yes", "role             gateway", "hypha-python/", "certificate end"):
            assert word in text
    log = (tmp_path / "worker.log").read_text()
    assert "Traceback" not in log
    assert re.search(rf"{file}:\d+: work_dir stands under \[resources\]", log)


@pytest.mark.nightly
def test_a_file_for_accelerate_is_one(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(block("worker-older:339").text)
    code = (
        "from accelerate.commands.config.config_args import load_config_from_file as load\n"
        "c = load('accelerate.yaml')\n"
        "print(type(c).__name__, c.compute_environment.value, c.distributed_type, c.mixed_precision, c.use_cpu)"
    )
    done = run([sys.executable, "-c", code], env=quiet_environment(), cwd=tmp_path, timeout=100)
    assert "ClusterConfig LOCAL_MACHINE" in passed(done)
    assert "NO" in done.stdout.split(" ")[2]
    assert done.stdout.split()[3:] == ["fp16", "False"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_accelerate_asks_for_a_configuration(tmp_path: Path) -> None:
    """The block is interactive, so only its help and its default are run."""
    command = block("worker-older:349").text.split()
    program = str(Path(sys.executable).parent / command[0])
    written = tmp_path / "accelerate.yaml"
    passed(run([program, *command[1:], "default", "--config_file", str(written)], timeout=200))
    assert json.loads(written.read_text())["compute_environment"] == "LOCAL_MACHINE"  # JSON is YAML


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_executor_is_run_from_the_wheel_of_a_release(wheels: Path, tmp_path: Path) -> None:
    """Replaced: the release site (a local server), the version (that of this tree) and the Python interpreter."""
    version = next(each.version for each in packages() if each.name == "hypha-accelerate-executor")
    text = block("worker-older:281").text
    assert text.count("0.1.0") >= 1  # the version that the block names
    with release_site(wheels) as site, empty_environment(tmp_path / "env", wheels) as environment:
        command = (
            text.replace("https://github.com", site)
            .replace("0.1.0", version)
            .replace("--python 3.12", f"--python {sys.executable}")
        )
        assert command.count(site) == 1
        assert environment.shell(command) == "Success\n"


@pytest.mark.nightly
def test_an_extra_without_a_project_has_no_effect(tmp_path: Path, wheels: Path) -> None:
    """The user's documents choose PyTorch's build by `--extra`; ours use `package[extra] @ URL`, for this reason."""
    with empty_environment(tmp_path / "env", wheels) as environment:
        tail = f"--python {sys.executable} --no-project --extra cu128 --with hypha-proto -- python -c 'print(1)' 2>&1"
        shown = environment.shell(f"uv run {tail}")
    assert "has no effect" in shown
    assert shown.endswith("1\n")


@pytest.mark.parametrize(
    "program",
    [
        "hypha-worker",
        *(pytest.param(f"hypha-{each}", marks=pytest.mark.nightly) for each in ("gateway", "data", "scheduler")),
    ],
)
def test_what_init_writes_is_valid_and_lists_every_key(program: str, tmp_path: Path) -> None:
    file = tmp_path / "made" / "node.toml"
    passed(run([script(program), "init", "--out", str(file)], cwd=tmp_path))
    assert "cert_pem = " in passed(run([script(program), "config", "show", "--config", str(file)]))
    schema = json.loads(passed(run([script(program), "schema"])))
    text = file.read_text()
    for key in schema["properties"]:
        assert re.search(rf"^(# )?(\[+)?{key}\b", text, re.MULTILINE), key
    refused = run([script(program), "init", "--out", str(file)])
    assert refused.returncode == 1
    assert "--force" in refused.stderr


@pytest.mark.nightly
def test_the_exit_codes_of_the_conventions(tmp_path: Path) -> None:
    worker = script("hypha-worker")
    node = NodePlan("worker", "hypha-worker", "worker", 1)
    write_certificates(tmp_path, [node])
    file = tmp_path / "worker.toml"
    keys = "".join(f'{kind}_pem = "worker-{kind}.pem"\n' for kind in KINDS)
    file.write_text(
        completed_worker(keys).replace("203.0.113.50", "127.0.0.1").replace("/var/hypha/work", str(tmp_path / "w"))
    )
    assert run([worker, "--version"]).returncode == 0
    [closed] = free_ports(1)
    gone = run([worker, "probe", f"/ip4/127.0.0.1/tcp/{closed}", "--config", str(file), "--timeout", "5"])
    assert gone.returncode == 3, gone.stderr
    assert len(gone.stderr.strip().splitlines()) == 1
    assert run([worker, "nonsense"]).returncode == 2
    assert run([worker, "probe", "nonsense", "--config", str(file)]).returncode == 2
    file.write_text("cert_pem = 1\nworkdir = 2\n")
    wrong = run([worker, "run", "--config", str(file)])
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    for part in (f"{file}:1: cert_pem = 1", f"{file}:2: workdir", "did you mean work_dir?", "key_pem: is missing"):
        assert part in wrong.stderr


@pytest.mark.parametrize("program", ["hypha-worker", "hypha-certutil", "hypha-local"])
def test_a_shell_can_complete_commands(program: str) -> None:
    """As docs/configuration.md describes; queried as the shell function does."""
    name = program.upper().replace("-", "_")
    function = passed(run([script(program)], env=quiet_environment(**{f"_{name}_COMPLETE": "bash_source"})))
    assert f"complete -o nosort -F _{program.replace('-', '_')}_completion {program}" in function
    asking = {f"_{name}_COMPLETE": "bash_complete", "COMP_WORDS": f"{program} ", "COMP_CWORD": "1"}
    offered = passed(run([script(program)], env=quiet_environment(**asking))).split()
    expected = {"hypha-worker": "probe", "hypha-certutil": "revoke", "hypha-local": "demo"}[program]
    assert f"plain,{expected}" in offered


def test_what_cannot_be_run_here_is_as_the_table_says() -> None:
    """Web installers and a Rust build: the blocks contain these commands and no others."""
    commands = [line for name in ("worker-older:32", "worker-older:276") for line in block(name).text.splitlines()]
    commands = [line for line in commands if line and not line.startswith("#")]
    assert [line.split()[0] for line in commands] == ["curl", "cargo", "curl"]
    assert shutil.which("hypha-worker") is None or os.access(script("hypha-worker"), os.X_OK)
