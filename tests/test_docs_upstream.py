"""Every report of docs/upstream.md holds for the pinned py-libp2p: its program prints what the report says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PAGE = Path(__file__).parent.parent / "docs" / "upstream.md"


def reports() -> list[tuple[str, str, str]]:
    """Title, program and output of each report."""
    begin, *sections = PAGE.read_text().split("\n## ")
    (preamble,) = re.findall(r"```python\n(.*?)```", begin, re.DOTALL)
    found = []
    for section in sections:
        title = section.splitlines()[0]
        for program, output in re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", section, re.DOTALL):
            found.append((title, preamble + "\n" + program, output))
    return found


REPORTS = reports()


def test_the_page_is_read() -> None:
    assert len(REPORTS) == PAGE.read_text().count("\nWhere: ") > 10


def as_parameter(title: str, program: str, output: str) -> Any:
    """Return a report as a test's parameter; they mostly wait, but the sixth opens 256 streams in five seconds."""
    return pytest.param(program, output, id=title, marks=() if title.startswith("6. ") else pytest.mark.concurrent)


@pytest.mark.parametrize(("program", "output"), [as_parameter(*report) for report in REPORTS])
def test_a_report_s_program_prints_what_the_report_says(program: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "report.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=110)
    assert output.strip() in done.stdout, (done.stdout, done.stderr[-2000:])
