"""Fixtures of the tests against rust-libp2p: the built peer, and certificates by `hypha-certutil`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from interop.authority import Authority
from interop.rust_peer import build


@pytest.fixture(scope="session")
def binary() -> Path:
    """The Rust peer."""
    return build()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority of its own for each test."""
    return Authority(tmp_path / "ca")


@pytest.fixture
def certify(authority: Authority) -> Callable[..., Path]:
    """Makes a node's files."""
    return authority.node
