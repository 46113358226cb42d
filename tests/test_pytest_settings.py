"""Settings of the test suite: `--lf` and `--pdb` work, and tests that need namespaces are not skipped in CI."""

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
    settings = ["-c", str(ROOT / "pytest.ini"), "--rootdir", str(folder), "-p", "conftest", "-o", "cache_dir=cache"]
    command = [sys.executable, "-m", "pytest", *settings, *options, str(folder)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=folder, input="q\n", capture_output=True, text=True, timeout=150, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_what_failed_last_is_run_again_and_debugged(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_passes():\n    pass\n\n\ndef test_fails():\n    assert False\n")
    printed = run_pytest(tmp_path)
    assert "created: 2/2 workers" in printed
    assert "1 failed, 1 passed" in printed
    printed = run_pytest(tmp_path, "--lf", "--pdb")
    assert "(Pdb)" in printed
    assert "rerun previous 1 failure" in printed
    assert "passed" not in printed


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
