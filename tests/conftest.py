"""Fixtures of tests of the whole repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.wheelhouse import build_wheelhouse


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and an sdist of every package once; return their folder."""
    folder: Path = tmp_path_factory.mktemp("wheels")
    return build_wheelhouse(folder)
