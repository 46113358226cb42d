"""Settings of the test suite: repeated tests, and tests that need namespaces are not skipped in CI."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_pytest(folder: Path, *options: str) -> str:
    """Run the tests of a folder under this repository's settings; return what pytest printed."""
    settings = ["-c", str(ROOT / "pytest.ini"), "--rootdir", str(folder), "-o", "cache_dir=cache"]
    settings += ["-p", "conftest", "-o", "pythonpath="]  # the repository's, not that of a folder in pythonpath
    command = [sys.executable, "-m", "pytest", *settings, *options, str(folder)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=folder, input="q\n", capture_output=True, text=True, timeout=150, check=False
    )
    return done.stdout + done.stderr


def test_a_test_of_processes_is_repeated_once_and_its_first_failure_printed(tmp_path: Path) -> None:
    (tmp_path / "test_processes.py").write_text(
        """
import pathlib
import pytest

pytestmark = [pytest.mark.gate, pytest.mark.processes]


def test_fails_once(request):
    before = pathlib.Path(__file__).with_name("before")
    print("attempt", "two" if before.exists() else "one")
    assert before.exists() or before.touch()


def test_fails():
    raise AssertionError


@pytest.mark.gate
def test_passes():
    pass
"""
    )
    printed = run_pytest(tmp_path, "-m", "gate", "-n", "0")
    assert "1 failed, 2 passed, 2 rerun" in printed
    assert "attempt one" in printed
    repeated = next(line for line in printed.splitlines() if line.startswith("repeated: "))
    assert repeated.split() == ["repeated:", "2", "test_processes.py::test_fails", "test_processes.py::test_fails_once"]


def test_an_everyday_test_is_not_repeated(tmp_path: Path) -> None:
    text = "import pytest\n\n\n@pytest.mark.processes\ndef test_passes():\n    pass\n"
    (tmp_path / "test_everyday.py").write_text(text)
    assert "an everyday test is not repeated; mark it gate or nightly" in run_pytest(tmp_path, "-n", "0")


@pytest.mark.parametrize(("ci", "skipped"), [("", True), ("true", False)])
def test_a_machine_that_cannot_make_namespaces_skips_their_tests_unless_it_is_ci(
    ci: str, skipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    loaded = runpy.run_path(str(ROOT / "tests" / "support" / "netns.py"), run_name="namespaces_without_tools")
    assert loaded["needs_namespaces"].args == (skipped,)
    assert "ip, nft not found" in loaded["needs_namespaces"].kwargs["reason"]
    with pytest.raises(AssertionError, match="ip, nft not found"), loaded["two_homes"]():
        pass
