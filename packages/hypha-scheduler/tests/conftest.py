"""Fixtures of this package's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an organisation that all nodes of a test trust."""
    return Authority(tmp_path / "acme")
