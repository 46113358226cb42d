"""Fixtures of tests of the whole repository."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fault_table import HEAD, FaultRow, fault_row_of, rows_of
from support.wheelhouse import build_wheelhouse


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Build a wheel and an sdist of every package, once for all pytest processes; return their folder."""
    # uv caches wheels by the path of their folder and does not look at the files again: each run has a path of its own
    name = f"wheels-{secrets.token_hex(4)}"
    if worker_id == "master":
        return build_wheelhouse(tmp_path_factory.mktemp(name))
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "wheels").exists():
            (shared / "wheels").symlink_to(build_wheelhouse(shared / name))
    return (shared / "wheels").resolve()


@pytest.fixture
def fault_row(record_property: Callable[[str, object], None]) -> FaultRow:
    """Return a function that notes a fault and what was seen; all notes are printed after the tests."""
    return fault_row_of(record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the faults that passed tests have noted."""
    if rows := rows_of(terminalreporter.getreports("passed")):
        terminalreporter.section("faults")
        for line in (*HEAD, *rows):
            terminalreporter.write_line(line)
