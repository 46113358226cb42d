"""Run the program of every report in docs/upstream against the pinned py-libp2p and compare its output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "upstream"
FILES = sorted(FOLDER.glob("[0-9]*.md"))


def reports() -> list[tuple[str, str, str]]:
    """Return title, program and output of each report."""
    (prelude,) = re.findall(r"```python\n(.*?)```", (FOLDER / "index.md").read_text(), re.DOTALL)
    found = []
    for file in FILES:
        text = file.read_text()
        title = text.splitlines()[0].removeprefix("# ")
        for program, output in re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL):
            found.append((title, prelude + "\n" + program, output))
    return found


REPORTS = reports()


def test_every_report_is_found() -> None:
    assert len(REPORTS) == sum(file.read_text().count("\nWhere: ") for file in FILES) > 10


def test_the_index_lists_every_report() -> None:
    rows = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \| .+ \|$", (FOLDER / "index.md").read_text(), re.MULTILINE)
    assert [name for _, _, name in rows] == [file.name for file in FILES]
    assert [f"{number}. {title}" for number, title, _ in rows] == [
        file.read_text().splitlines()[0].removeprefix("# ") for file in FILES
    ]


@pytest.mark.upstream
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("program", "output"), [pytest.param(*rest, id=title) for title, *rest in REPORTS])
def test_a_report_s_program_prints_what_the_report_says(program: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "report.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=110)
    assert output.strip() in done.stdout, (done.stdout, done.stderr[-2000:])
