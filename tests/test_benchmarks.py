"""Each benchmark runs at a small size, transfers its data completely and prints its table; no speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = (
    "transfer",
    "footprint",
    "relay",
    "requests",
    "connect",
    "connectors",
    "gossip",
    "start",
    "memory",
    "placement",
    "runner",
    "tasks",
    "inference",
    "isolation",
    "bridge",
    "goodput",
    "uneven",
    "faults",
    "outer_step",
    "prepare",
    "training",
    "demo",
)


def run(tmp_path: Path, *arguments: str, timeout: float) -> tuple[str, list[dict[str, Any]]]:
    """Run benchmarks; return their output and their rows."""
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks", *arguments, "--folder", str(tmp_path), "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    assert [path for path in tmp_path.iterdir() if path != found] == []
    return done.stdout, json.loads(found.read_text())["rows"]


@pytest.mark.nightly
@pytest.mark.timeout(640)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_transfers_its_data(tmp_path: Path, name: str) -> None:
    small = ("--size", "8", "--repeat", "1", "--count", "20", "--leaves", "6", "--minutes", "0.8", "--workers", "20")
    printed, rows = run(tmp_path, name, *small, timeout=600)
    assert printed.startswith(f"\n{name}\n")
    assert rows
    for row in rows:
        assert f"| {row['what']} |" in printed
        assert row["ours"] > 0 or name == "footprint" or row["what"] == "anonymous memory that it takes"
        assert (row["ratio"] is None) == (row["reference"] is None)


def test_an_unknown_benchmark_is_refused_with_the_known_names() -> None:
    command = [sys.executable, "-m", "benchmarks", "transfers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"no benchmark 'transfers'; there are: {', '.join(NAMES)}" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_eight_transfers_of_a_gibibyte_take_less_than_128_mib(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "footprint", "--size", "1024", timeout=800)
    assert len(rows) == 2
    for row in rows:
        assert row["ours"] < 128, row


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_runner_takes_less_than_five_milliseconds_a_report_and_reads_a_long_journal_in_25_seconds(
    tmp_path: Path,
) -> None:
    """Five times what is required and measured on an idle machine."""
    _, rows = run(tmp_path, "runner", "--count", "200", timeout=200)
    found = {row["what"]: row["ours"] for row in rows}
    [report] = [value for what, value in found.items() if what.startswith("report") and "does nothing" in what]
    [request] = [value for what, value in found.items() if what.startswith("request") and "does nothing" in what]
    [read] = [value for what, value in found.items() if what.endswith("read")]
    [restored] = [value for what, value in found.items() if what.endswith("restored")]
    assert max(report, request) < 5
    assert max(read, restored) < 25
