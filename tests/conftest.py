"""Fixtures of tests that concern the whole repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.wheelhouse import build_wheelhouse


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of every package, built once."""
    folder: Path = tmp_path_factory.mktemp("wheels")
    return build_wheelhouse(folder)
