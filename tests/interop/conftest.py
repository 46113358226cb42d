"""Fixtures of the tests against rust-libp2p: the built peer, and certificates by `hypha-certutil`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from interop.rust_peer import build

from hypha_local.processes import script

Certify = Callable[..., Path]


@pytest.fixture(scope="session")
def binary() -> Path:
    """The Rust peer."""
    return build()


@pytest.fixture
def certify(tmp_path: Path) -> Certify:
    """Gives a function that has `hypha-certutil` make a node's files; it returns their prefix."""
    folder = tmp_path / "ca"

    def tool(*words: str) -> None:
        done = subprocess.run(
            [script("hypha-certutil"), *words, "--dir", str(folder)], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr

    def node(name: str, role: str | None = None) -> Path:
        tool("node", name, "--out", str(folder / "nodes"), *(("--role", role) if role else ()))
        shutil.copy(folder / "crls.pem", folder / "nodes" / f"{name}-crls.pem")
        return folder / "nodes" / name

    tool("root")
    tool("org")
    return node
