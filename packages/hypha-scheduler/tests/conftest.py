"""Fixtures of this package's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import pytest
from support.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an organisation that all nodes of a test trust."""
    return Authority(tmp_path / "acme")


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of threads in the event loop: a virtual clock does not wait for threads."""

    async def inline(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(anyio.to_thread, "run_sync", inline)
