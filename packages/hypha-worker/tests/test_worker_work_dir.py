"""The work directory: removal of the job folders that killed workers have left."""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hypha_worker.work_dir import clear_work_dir


@pytest.mark.parametrize("kind", ["hypha", "outputs"])
def test_folders_of_a_killed_worker_are_removed_at_the_next_start(tmp_path: Path, kind: str) -> None:
    work = tmp_path / "work"
    stale, others = work / f"{kind}-{uuid.uuid4()}", [work / "hypha-notes", work / "results"]

    def leave() -> None:
        for path in (stale, *others):
            path.mkdir(parents=True, exist_ok=True)
            (path / "model").write_bytes(b"x")

    leave()
    with ExitStack() as first:
        clear_work_dir(work, first)
        assert not stale.exists()
        leave()
        with ExitStack() as second:  # a second worker in the same folder: this may be a job of the first
            clear_work_dir(work, second)
            assert stale.exists()
        first.close()
        with ExitStack() as third:
            clear_work_dir(work, third)
            assert not stale.exists()
    assert all((path / "model").exists() for path in others)


def test_what_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = tmp_path / f"hypha-{uuid.uuid4()}"
    job.mkdir()
    (job / "kept").write_bytes(b"x")
    (job / "other").write_bytes(b"x")
    unlink = os.unlink

    def refuse(path: str, **options: Any) -> None:
        if os.path.basename(path) == "kept":
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **options)

    monkeypatch.setattr("os.unlink", refuse)
    with ExitStack() as stack:
        clear_work_dir(tmp_path, stack)
    assert [path.name for path in job.iterdir()] == ["kept"]
    assert f"{job} cannot be removed completely" in caplog.text
    assert "Operation not permitted" in caplog.text


def test_job_folders_of_running_workers_are_kept_after_the_first_has_ended(
    tmp_path: Path,
) -> None:
    job = tmp_path / f"hypha-{uuid.uuid4()}"
    with ExitStack() as first, ExitStack() as second, ExitStack() as third:
        clear_work_dir(tmp_path, first)
        clear_work_dir(tmp_path, second)
        job.mkdir()  # a job of the second worker
        first.close()
        clear_work_dir(tmp_path, third)
        assert job.exists()
