"""Fixtures of this package's tests."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import pytest
from support.authority import Authority
from support.scripted_jobs import OpenJobs, open_scripted_jobs


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an organisation that all nodes of a test trust."""
    return Authority(tmp_path / "acme")


@pytest.fixture
def open_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenJobs:
    """Return `support.scripted_jobs.open_scripted_jobs`, for this test."""
    return partial(open_scripted_jobs, monkeypatch, tmp_path)


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose path is short enough for a socket."""
    return tmp_path_factory.getbasetemp() / uuid.uuid4().hex[:8]


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of threads in the event loop: a virtual clock does not wait for threads."""

    async def inline(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(anyio.to_thread, "run_sync", inline)
