"""Journal: truncated lines are skipped and failed syncs are raised."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hypha_scheduler.jobs.journal import Journal, read_journal


def test_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.record("accepted", job_id="x")
    with path.open("ab") as file:
        file.write(b'{"record": "rou')
    assert read_journal(path) == [{"record": "accepted", "format": 1, "job_id": "x"}]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_journal(tmp_path / "none") == []


def test_failed_background_sync_is_raised_by_the_next_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.record_async("round", round=1)
        with monkeypatch.context() as broken:
            broken.setattr("hypha_scheduler.jobs.json_lines.os.fsync", fail)
            journal.record_async("round", round=2)
            journal._disk.submit(int).result(10)  # after the sync in the same thread
        with pytest.raises(OSError, match="Input/output"):
            journal.record_async("round", round=3)
    assert [record["round"] for record in read_journal(tmp_path / "journal.jsonl")] == [1, 2]
