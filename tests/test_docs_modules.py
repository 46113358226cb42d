"""docs/modules.md is what tools/module_docs.py prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "module_docs.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_page_is_what_the_script_prints() -> None:
    printed = run()
    assert printed.returncode == 0, printed.stderr
    assert (ROOT / "docs" / "modules.md").read_text() == printed.stdout, (
        "regenerate it: uv run python tools/module_docs.py > docs/modules.md"
    )
    assert run("--check").returncode == 0


def test_every_module_is_listed_and_has_a_docstring() -> None:
    sources = [file for group in ("packages", "executors", "drivers") for file in ROOT.glob(f"{group}/*/src/**/*.py")]
    items = [line for line in run().stdout.splitlines() if line.lstrip().startswith("- `")]
    namespaces = [line for line in items if line == "- `hypha/`"]
    assert len(items) - len(namespaces) == len(sources) > 100
    assert [line for line in items if "`: " not in line and line not in namespaces] == []
