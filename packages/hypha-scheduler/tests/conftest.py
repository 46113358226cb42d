"""Fixtures of this package's tests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from support.authority import Authority
from support.scripted_jobs import Lab, OpenJob, OpenJobs, ScriptedJob, ScriptedStrategy, open_scripted_jobs, run_inline


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an organisation that all nodes of a test trust."""
    return Authority(tmp_path / "acme")


@pytest.fixture
def open_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OpenJobs:
    """Return `support.scripted_jobs.open_scripted_jobs`, for this test."""
    return partial(open_scripted_jobs, monkeypatch, tmp_path)


@pytest.fixture
def open_job(open_jobs: OpenJobs) -> OpenJob:
    """Return a function that opens a lab and starts a job in it, which succeeds at the end of the context."""

    @asynccontextmanager
    async def opened(
        strategy: ScriptedStrategy | None = None, job: ScriptedJob | None = None, **settings: Any
    ) -> AsyncIterator[tuple[Lab, Any]]:
        async with open_jobs(strategy, **settings) as lab:
            operator = await lab.start(job)
            yield lab, operator
            await lab.finish(operator)

    return opened


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose path is short enough for a socket."""
    return tmp_path_factory.getbasetemp() / uuid.uuid4().hex[:8]


@pytest.fixture
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of threads in the event loop."""
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_inline)
