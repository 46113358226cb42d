"""Commands of a daemon, without a network: output, written files, errors and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import Field
from support.authority import Authority

from hypha_net.node.cli import Program
from hypha_net.node.config.models import NodeConfig, Section
from hypha_net.node.config.toml_output import to_toml
from hypha_net.node.lifecycle import Node


class Resources(Section):
    cpu: float = Field(default=1.0, description="Processor cores.")
    devices: list[dict[str, int]] = Field(default=[], description="GPUs.")


class Executor(Section):
    name: str = Field(description="What jobs ask for.")
    args: list[str] = Field(default=[], description="Arguments.")


class ExampleConfig(NodeConfig):
    work_dir: Path = Field(description="Folder of the jobs.")
    resources: Resources = Field(default=Resources(), description="What is offered.")
    executors: list[Executor] = Field(default=[], description="What runs jobs.")


async def serve(config: ExampleConfig, node: Node) -> None:
    raise AssertionError("these tests start no network")


def detect() -> dict[str, object]:
    return {"work_dir": 'w"ork', "resources": {"cpu": 16}, "executors": [{"name": "a", "args": ["{X}"]}, {"name": "b"}]}


# the version is that of the distribution with this name
main = Program("hypha-net", lambda: ExampleConfig, serve, role="worker", example=detect).cli()


def run(*args: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], env=env)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.toml"
    assert run("init", "--out", path).exit_code == 0
    return path


def test_init_template_describes_every_option_and_starts(file: Path) -> None:
    text = file.read_text()
    words = text.replace("\n# ", " ")
    for name, info in ExampleConfig.model_fields.items():
        assert re.search(rf"^(# )?\[*{name}\b", text, re.MULTILINE), name
        assert info.description
        assert info.description in words
    data = tomllib.loads(text)
    assert data["work_dir"] == 'w"ork'
    assert data["resources"] == {"cpu": 16}
    assert data["executors"] == [{"name": "a", "args": ["{X}"]}, {"name": "b"}]
    assert "exclude_cidr" not in data
    Authority(file.parent).files("worker")
    checked = run("run", "--check", "--config", file)
    assert checked.exit_code == 0, checked.output
    assert checked.stdout == f"{file}: ok\n"


def test_init_names_the_files_of_a_node_as_hypha_certutil_does(tmp_path: Path) -> None:
    Authority(tmp_path).files("gpu-3")
    file = tmp_path / "worker.toml"
    assert run("init", "--out", file, "--name", "gpu-3").exit_code == 0
    assert tomllib.loads(file.read_text())["trust_pem"] == "gpu-3-trust.pem"
    checked = run("run", "--check", "--config", file)
    assert checked.exit_code == 0, checked.output


def test_check_fails_where_the_certificate_is_missing(file: Path) -> None:
    checked = run("run", "--check", "--config", file)
    assert (checked.exit_code, checked.stdout) == (1, "")
    assert f"cert_pem {file.parent / 'worker-cert.pem'} cannot be read" in checked.stderr
    assert "hypha-certutil node" in checked.stderr
    assert "Traceback" not in checked.output


def test_init_does_not_overwrite_without_force(file: Path) -> None:
    file.write_text("mine")
    refused = run("init", "--out", file)
    assert refused.exit_code == 1
    assert "--force" in refused.stderr
    assert file.read_text() == "mine"
    assert run("init", "--out", file, "--force", "--lan").exit_code == 0
    assert tomllib.loads(file.read_text())["exclude_cidr"] == []


@pytest.mark.parametrize("form", [["run", "--config"], ["run", "--check", "--config"], ["--config"]])
def test_invalid_configuration_exits_with_2_and_every_error(file: Path, form: list[str]) -> None:
    file.write_text('work_dirr = "x"\ngateway_addresses = ["nonsense"]\n')
    refused = run(*form, file)
    assert refused.exit_code == 2
    assert refused.stdout == ""
    for part in (f"{file}:1: work_dirr: is not a key", "did you mean work_dir?", f"{file}:2:", "cert_pem: is missing"):
        assert part in refused.stderr


def test_missing_configuration_names_the_remedy() -> None:
    refused = run("run")
    assert refused.exit_code == 2
    assert "hypha-net init" in refused.stderr
    assert run("run", "--set", "nonsense").exit_code == 2
    assert run("--config", "x", "run").exit_code == 2


def test_command_line_without_command_accepts_the_options_of_run(file: Path) -> None:
    Authority(file.parent).files("worker")
    options = ["--config", str(file), "--check", "--log-format", "json", "--log-level", "warning"]
    for form in (["run", *options], options):
        checked = run(*form, "--set", "limits.max_connections=7")
        assert (checked.exit_code, checked.stdout) == (0, f"{file}: ok\n")
        assert all(json.loads(line)["level"] == "warning" for line in checked.stderr.splitlines())
        assert run(*form, "--set", "limits.max_connections=many").exit_code == 2
    misplaced = run("--log-format", "json", "run", "--config", file)
    assert misplaced.exit_code == 2
    assert "write the options of run after it" in misplaced.stderr


def test_show_prints_values_and_origins_and_hides_secrets(file: Path) -> None:
    env = {"HYPHA_RESOURCES__CPU": "3", "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20hunter2"}
    result = run("config", "show", "--config", file, "--set", "limits.max_connections=7", "--format", "json", env=env)
    shown = json.loads(result.stdout)
    assert shown["resources.cpu"] == {"value": 3.0, "origin": "HYPHA_RESOURCES__CPU"}
    assert shown["limits.max_connections"] == {"value": 7, "origin": "--set limits.max_connections"}
    assert shown["executors[0].name"]["value"] == "a"
    assert shown["executors[0].name"]["origin"].startswith(f"{file}:")
    assert shown["relay_circuit"] == {"value": True, "origin": "default"}
    assert shown["telemetry_headers"] == {"value": "***", "origin": "OTEL_EXPORTER_OTLP_HEADERS"}
    text = run("config", "show", "--config", file, env=env)
    assert "resources.cpu = 3.0  # HYPHA_RESOURCES__CPU" in text.stdout
    assert "hunter2" not in result.output + text.output


def test_show_quotes_key_parts_as_toml_does(file: Path) -> None:
    with file.open("a") as more:
        more.write('\n[telemetry_attributes]\n"service.name" = "a"\nteam = "b"\n')
    shown = run("config", "show", "--config", file).stdout
    lines = [line.split("  # ")[0] for line in shown.splitlines() if line.startswith("telemetry_attributes")]
    assert lines == ['telemetry_attributes."service.name" = "a"', 'telemetry_attributes.team = "b"']
    assert tomllib.loads("\n".join(lines))["telemetry_attributes"] == {"service.name": "a", "team": "b"}
    plain = json.loads(run("config", "show", "--config", file, "--format", "json").stdout)
    assert plain["telemetry_attributes.service.name"]["origin"].startswith(f"{file}:")


def test_schema_contains_every_key() -> None:
    schema = json.loads(run("schema").stdout)
    assert set(schema["properties"]) == set(ExampleConfig.model_fields)


def test_probe_without_usable_certificates_is_a_configuration_error(file: Path) -> None:
    refused = run("probe", "/ip4/127.0.0.1/tcp/1", "--config", file, "--timeout", "5")
    assert refused.exit_code == 2
    assert "worker-cert.pem" in refused.stderr
    assert "hypha-certutil node" in refused.stderr
    assert "Traceback" not in refused.output


def test_help_and_version_import_neither_libp2p_nor_trio() -> None:
    for flag in ("-h", "--help"):
        assert "probe" in run(flag).stdout
    assert run("--version").stdout.startswith("hypha-net, version ")
    code = "import sys, hypha_net.node.cli; print([m for m in ('libp2p', 'trio') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert loaded.stdout == "[]\n"


@pytest.mark.parametrize(
    "value", ['a"b\\c\n', "ünï", True, 3, 2.5, [], ["x"] * 40, {"service.name": "n", "b": [1]}, Path("a/b")]
)
def test_values_round_trip_through_toml(value: object) -> None:
    read = tomllib.loads(f"value = {to_toml(value)}")["value"]
    assert read == (str(value) if isinstance(value, Path) else value)


def test_readme_example_is_a_working_daemon(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (tmp_path / "echo_daemon.py").write_text(readme.split("```python\n")[1].split("```")[0] + "\nmain()\n")
    command = [sys.executable, str(tmp_path / "echo_daemon.py")]
    file = str(tmp_path / "echo.toml")
    subprocess.run([*command, "init", "--out", file], timeout=30, check=True)
    shown = subprocess.run([*command, "config", "show", "--config", file], capture_output=True, timeout=30, text=True)
    assert "cert_pem = " in shown.stdout, shown.stderr
