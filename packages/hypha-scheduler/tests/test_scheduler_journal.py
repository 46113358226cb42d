"""Journal: truncated lines are skipped and failed syncs are raised."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import Journal, check_names, read_journal


def test_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.record("accepted", job_id="x")
    with path.open("ab") as file:
        file.write(b'{"record": "rou')
    assert read_journal(path) == [{"record": "accepted", "format": 2, "job_id": "x"}]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_journal(tmp_path / "none") == []


def test_truncated_last_line_is_cut_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.record("accepted", job_id="x")
        journal.append("round", round=1)
    whole = path.read_bytes()
    for cut in range(1, 20):
        path.write_bytes(whole[:-cut])
        with Journal(path) as journal:
            journal.append("round", round=2)
        accepted, second = read_journal(path)
        assert accepted["format"] == 2
        assert second == {"record": "round", "round": 2}


def test_journal_whose_only_line_was_cut_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"record": "acc')
    with Journal(path) as journal:
        journal.record("accepted")
    assert read_journal(path) == [{"record": "accepted", "format": 2}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"record": "accepted", "format": 1}\n', "is of format 1, this version reads 2"),
        ('{"record": "accepted"}\n', "is of format None"),
        ('{"record": "accepted", "format": 2}\n{"record": \n{"record": "x"}\n', "line 2 of the journal is malformed"),
        ('{"record": "accepted", "format": 2}\n7\n', "line 2 of the journal is malformed: not an object"),
    ],
)
def test_unknown_format_or_malformed_line_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(lines)
    with pytest.raises(JobFailedError, match=message):
        read_journal(path)


@pytest.mark.parametrize("fields", [{"record": "x"}, {"format": 2}])
def test_names_of_the_runner_are_refused_in_records_of_strategies(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rename it"):
        check_names("mine", fields)
    with pytest.raises(ValueError, match="name yours otherwise"):
        check_names("finished", {})
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("mine", kind="allowed", self="too")
    [found] = read_journal(tmp_path / "journal.jsonl")
    assert found == {"record": "mine", "format": 2, "kind": "allowed", "self": "too"}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("round", loss=float("inf"), each={"a": [float("nan"), 1.0]})
    [found] = read_journal(tmp_path / "journal.jsonl")
    assert (found["loss"], found["each"]) == (None, {"a": [None, 1.0]})


def test_failure_of_a_sync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports an error to one sync only; those after it succeed although records may be missing."""
    outcomes = iter([OSError(errno.EIO, "Input/output error"), None])

    def sync(_descriptor: int) -> None:
        if (error := next(outcomes)) is not None:
            raise error

    with Journal(tmp_path / "journal.jsonl") as journal:
        monkeypatch.setattr("hypha_scheduler.jobs.record_file.os.fsync", sync)
        journal.append("round", round=1)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                anyio.run(journal.sync)
        assert journal.synced == 0
        with pytest.raises(OSError, match="Input/output"):
            journal.append("round", round=2)
