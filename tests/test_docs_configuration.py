"""docs/configuration.md matches the programs: its tables, examples and shell lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.config_reference import PAGE, PROGRAMS, keys, with_tables
from support.doc_snippets import completed_worker
from support.wheelhouse import Package, packages, passed, quiet_environment, run

from hypha_local.processes import script

WORKER = script("hypha-worker")


def test_the_tables_have_the_keys_and_defaults_of_the_programs() -> None:
    def rows(page: str) -> list[tuple[str, ...]]:
        return re.findall(r"^\| `([^`]+)` \| ?(.*?) ?\|", page, re.MULTILINE)

    page = PAGE.read_text()
    assert rows(with_tables(page)) == rows(page), "write them anew: python tests/support/config_reference.py"
    assert len(rows(page)) > 100


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_says_what_it_is_for(program: str) -> None:
    assert [key for key, _, description in keys(PROGRAMS[program]) if not description] == []


def test_the_lines_of_the_example_are_what_config_show_prints(tmp_path: Path) -> None:
    text = completed_worker("").replace("/etc/hypha/cert.pem", "/etc/hypha/worker-cert.pem")
    (tmp_path / "worker.toml").write_text(text)
    example = re.findall(r"\$ (HYPHA\S+) hypha-worker config show .*\n((?:.+  # .+\n)+)", PAGE.read_text())
    [(variable, shown)] = example
    name, _, value = variable.partition("=")
    command = [WORKER, "config", "show", "--config", "worker.toml"]
    printed = passed(run(command, env=quiet_environment(**{name: value}), cwd=tmp_path))
    for line in shown.splitlines():
        assert line in printed.splitlines()


def test_the_errors_of_the_example_are_what_the_check_prints(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(
        'cert_pem = "c"\ntrust_pem = "t"\nwork_dir = "w"\ngateway_addresses = ["/ip4/1.2.3.4/tcp/1"]\n'
        'listen_address = []\n[resources]\ncpu = "many"\n'
    )
    done = run([WORKER, "run", "--check", "--config", "worker.toml"], cwd=tmp_path)
    shown = PAGE.read_text().split("$ hypha-worker run --check --config worker.toml\n")[1].split("```")[0]
    assert (done.returncode, done.stderr) == (2, shown)


def test_the_line_for_the_environment_runs(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(completed_worker(""))
    [line] = re.findall(r"^HYPHA_RESOURCES__GPU=24 .*$", PAGE.read_text(), re.MULTILINE)
    path = f"{Path(WORKER).parent}:/usr/bin:/bin"
    command = ["bash", "-euc", line.replace(" run ", " config show ")]
    assert passed(run(command, env=quiet_environment(PATH=path), cwd=tmp_path)).count("resources.gpu = 24.0") == 1


def test_the_line_for_completion_is_understood_by_bash() -> None:
    [line] = re.findall(r"^eval .*$", PAGE.read_text(), re.MULTILINE)
    text = f"{line}\ncomplete -p hypha-worker"
    env = quiet_environment(PATH=f"{Path(WORKER).parent}:/usr/bin:/bin")
    done = subprocess.run(["bash", "-euc", text], env=env, capture_output=True, text=True, timeout=30, check=True)
    assert "_hypha_worker_completion" in done.stdout


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(each, marks=[pytest.mark.nightly] * (each.name != "hypha-worker"), id=each.name)
        for each in packages()
        if each.programs
    ],
)
def test_every_program_keeps_to_the_conventions(package: Package) -> None:
    [program] = package.programs
    shown = passed(run([script(program), "-h"]))
    assert passed(run([script(program), "--help"])) == shown
    assert package.version in passed(run([script(program), "--version"]))
    wrong = run([script(program), "--nonsense"])
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--nonsense" in wrong.stderr
    plain = shown if package.name != "hypha-local" else passed(run([script(program), "demo", "-h"]))
    assert "--no-color" in plain


def test_secrets_are_hidden_wherever_a_value_is_shown(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(
        completed_worker('telemetry_endpoint = "https://me:hunter2@collector:4318"\ntelemetry_headers = "k=hunter2"\n')
        + '[[executors]]\nclass = "train"\nname = "a"\ncmd = "b"\nenv = { HF_TOKEN = "hunter2", API_KEY = "hunter2" }\n'
    )
    command = [WORKER, "config", "show", "--config", "worker.toml"]
    for form in ("text", "json"):
        shown = run([*command, "--format", form], cwd=tmp_path)
        assert "https://***@collector:4318" in passed(shown)
        assert "hunter2" not in shown.stdout + shown.stderr
    wrong = run(
        [*command, "--set", "telemetry_headers=hunter2", "--set", "telemetry_endpoint=ftp://hunter2@x"], cwd=tmp_path
    )
    assert wrong.returncode == 2
    assert "***" in wrong.stderr
    assert "hunter2" not in wrong.stderr
