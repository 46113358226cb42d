"""Fixtures of tests of the whole repository."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from support.wheelhouse import build_wheelhouse


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Build a wheel and an sdist of every package, once for all pytest processes; return their folder."""
    if worker_id == "master":
        return build_wheelhouse(tmp_path_factory.mktemp("wheels"))
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "wheels").exists():
            build_wheelhouse(shared / "wheels-unfinished").rename(shared / "wheels")
    return shared / "wheels"
