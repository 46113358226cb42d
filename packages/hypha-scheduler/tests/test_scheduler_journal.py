"""Journal and events: lines that are cut, failed syncs, a disk without room, and jobs that are unfinished."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hypha_net.node.config.loader import load_config
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryNetwork
from hypha_proto.global_model import RoundState
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.events import RETRY_INTERVAL, EndRecord, EndRecorder, EventFile, JobEvents
from hypha_scheduler.jobs.journal import Journal, check_names, read_journal
from hypha_scheduler.jobs.unfinished import MAX_NAMED, find_unfinished, log_unfinished
from hypha_scheduler.service import serve
from hypha_scheduler.strategies.diloco.records import round_record


def test_truncated_last_line_is_skipped_and_cut_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_journal(path) == []
    with Journal(path) as journal:
        journal.record("accepted", job_id="x")
        journal.append("round", round=1)
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    for cut in range(1, 20):
        path.write_bytes(whole[:-cut])
        assert read_journal(path) == [{"record": "accepted", "format": 2, "job_id": "x"}]
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
        monkeypatch.setattr("hypha_proto.record_file.os.fsync", sync)
        journal.append("round", round=1)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                anyio.run(journal.sync)
        assert journal.synced == 0
        with pytest.raises(OSError, match="Input/output"):
            journal.append("round", round=2)


@contextmanager
def running_job(runs: Path, rounds: int) -> Iterator[tuple[uuid.UUID, JobEvents]]:
    """Report a job with this many closed rounds; it runs within the context and has no end."""
    job_id = uuid.uuid4()
    (runs / str(job_id)).mkdir(parents=True)
    with JobEvents(job_id, runs / str(job_id)) as report:
        report.accepted({"dataset": "digits"})
        for number in range(1, rounds + 1):
            state = RoundState(number, *("blake3:" + digit * 64 for digit in "0132"))
            record = round_record(number, 1, [], [], state, 0.5)
            report.journal.append(record.kind, **record.fields)
        yield job_id, report


def interrupted_job(runs: Path, rounds: int) -> Path:
    with running_job(runs, rounds) as (job_id, _):
        pass
    return runs / str(job_id)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("rounds", [7, 5000], ids=["a short journal", "one that is read from both ends"])
def test_job_without_an_end_is_found_and_left_as_it_is(tmp_path: Path, rounds: int) -> None:
    directory = interrupted_job(tmp_path, rounds)
    assert ((directory / "journal.jsonl").stat().st_size > 3 * (64 << 10)) == (rounds == 5000)
    before = contents(tmp_path)
    [found] = find_unfinished(tmp_path)
    assert (found.job_id, found.directory, found.progress) == (directory.name, directory, f"round {rounds}")
    assert found.began is not None
    assert abs(found.began - found.last_record) < 60
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["failed", "finished", "has a result"])
def test_job_with_an_end_is_not_unfinished(tmp_path: Path, kind: str) -> None:
    with running_job(tmp_path, rounds=2) as (job_id, report):
        if kind == "has a result":
            (tmp_path / str(job_id) / "result.json").write_text("{}")
        else:
            end = report.failed("why") if kind == "failed" else report.finished({"rounds": 2})
            end.write()
    assert find_unfinished(tmp_path) == []


def test_a_job_that_was_resumed_after_a_failure_is_unfinished(tmp_path: Path) -> None:
    directory = interrupted_job(tmp_path, rounds=2)
    EndRecord(directory, "failed", {"error": "no room"}, {"error": "no room"}).write()
    with Journal(directory / "journal.jsonl") as journal:
        journal.record("resumed")
    assert [job.directory for job in find_unfinished(tmp_path)] == [directory]
    EndRecord(directory, "failed", {"error": "no room"}, {"error": "no room"}).write()
    assert find_unfinished(tmp_path) == []


def test_running_job_is_not_unfinished(tmp_path: Path) -> None:
    with running_job(tmp_path, rounds=2):
        assert find_unfinished(tmp_path) == []
    [_] = find_unfinished(tmp_path)


def test_what_is_not_a_job_is_skipped(tmp_path: Path) -> None:
    assert find_unfinished(tmp_path / "none") == []
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "scheduler.sock").touch()
    assert find_unfinished(tmp_path) == []


@pytest.mark.parametrize("planted", ["fifo", "link to a job", "link to a journal", "of another user"])
def test_what_others_have_put_there_is_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    elsewhere = interrupted_job(tmp_path / "elsewhere", rounds=1)
    runs = tmp_path / "runs"
    folder = runs / str(uuid.uuid4())
    match planted:
        case "fifo":
            folder.mkdir(parents=True)
            os.mkfifo(folder / "journal.jsonl")
        case "link to a job":
            runs.mkdir()
            folder.symlink_to(elsewhere)
        case "link to a journal":
            folder.mkdir(parents=True)
            (folder / "journal.jsonl").symlink_to(elsewhere / "journal.jsonl")
        case _ if os.geteuid():
            pytest.skip("only root can give files away")
        case _:
            os.chown(interrupted_job(runs, rounds=1) / "journal.jsonl", 12345, -1)
    assert find_unfinished(runs) == []
    assert "is not looked at" in caplog.text


@pytest.mark.parametrize("journal", [b"", b"\xff\x00\n{}\n[1]\n" + b"[" * 100_000, b'{"round": "x", "job_id": 3}\n'])
def test_damaged_journal_is_an_unfinished_job(tmp_path: Path, journal: bytes) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "journal.jsonl").write_bytes(journal)
    [found] = find_unfinished(tmp_path)
    assert (found.job_id, found.began, found.progress) == ("job", None, None)


def test_only_the_newest_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MAX_NAMED + 3):
        journal = interrupted_job(tmp_path, rounds=0) / "journal.jsonl"
        os.utime(journal, (1_000_000 + number, 1_000_000 + number))
    log_unfinished(find_unfinished(tmp_path), tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    assert journal.parent.name in messages[0]
    assert len(messages) == MAX_NAMED + 1
    assert messages[-1] == f"3 further jobs in {tmp_path} have no end"


async def test_scheduler_names_unfinished_jobs_when_it_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = interrupted_job(tmp_path / "runs", rounds=3)
    for name in ("round-9", "round-10", "round-.new"):
        (directory / "checkpoints" / name).mkdir(parents=True)
    file = tmp_path / "scheduler.toml"
    file.write_text('cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/127.0.0.1/tcp/1"]\n')
    config = load_config(SchedulerConfig, file, {}, {"output_dir": str(tmp_path / "runs")}).config

    async with MemoryNetwork(seed=1).endpoint("s") as endpoint, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, config, Node(endpoint, tasks))
        while not await anyio.Path(tmp_path / "runs" / "scheduler.sock").exists():
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    [message] = [record.getMessage() for record in caplog.records if record.name == "hypha_scheduler.jobs.unfinished"]
    assert message.startswith(f"job {directory.name} has no end: its scheduler ended while it ran. It began 2")
    assert "completed round 3 and was last recorded 2" in message
    assert f"its files are in {directory}. Resume it with `hypha-scheduler resume {directory} --config FILE`" in message
    newest = directory / "checkpoints" / "round-10"
    assert f"with model.path = '{newest}' to start from the model that it had" in message


WITH_LIMIT = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""
"""A limit of the file size stands in for a full disk: it takes the part of a line that fits, and fails the rest."""


def in_a_process(folder: Path, code: str) -> str:
    """Run code with `limit(bytes)` and `folder`; return its output."""
    script = f"{WITH_LIMIT}\nfolder = Path({str(folder)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WRITERS = {
    "metrics.jsonl": "from hypha_scheduler.jobs.events import EventFile as File; append = File.write",
    "journal.jsonl": "from hypha_scheduler.jobs.journal import Journal as File; append = File.record",
}


@pytest.mark.parametrize("name", WRITERS)
def test_line_that_does_not_fit_is_cut_off_and_its_error_names_the_path(tmp_path: Path, name: str) -> None:
    code = f"""
{WRITERS[name]}
with File(folder / "{name}") as file:
    append(file, "first", text="x" * 50)
    limit(200)
    try:
        append(file, "second", text="y" * 500)
    except OSError as error:
        print(error)
    limit(resource.RLIM_INFINITY)
    append(file, "third", text="z")
"""
    output = in_a_process(tmp_path, code)
    assert f"File too large: '{tmp_path / name}'" in output
    lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [line["text"] for line in lines] == ["x" * 50, "z"]


def test_file_ends_with_a_whole_line_while_the_disk_stays_full(tmp_path: Path) -> None:
    code = """
from hypha_scheduler.jobs.events import EventFile
limit(1000)
with EventFile(folder / "metrics.jsonl") as file:
    for number in range(100):
        try:
            file.write("metric", number=number)
        except OSError:
            pass
"""
    in_a_process(tmp_path, code)
    data = (tmp_path / "metrics.jsonl").read_bytes()
    assert 900 < len(data) <= 1000
    assert data.endswith(b"\n")
    assert [json.loads(line)["number"] for line in data.splitlines()] == list(range(data.count(b"\n")))


def end_in(folder: Path) -> EndRecord:
    with JobEvents(uuid.uuid4(), folder) as report:
        return report.failed("no room")


def read_end(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return events, read_journal(folder / "journal.jsonl")


def replace_by_folder(path: Path) -> None:
    """Make `path` impossible to open for writing."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("blocked", ["metrics.jsonl", "journal.jsonl"])
@pytest.mark.virtual_clock
async def test_end_is_recorded_once_it_can_be_written(tmp_path: Path, blocked: str) -> None:
    end = end_in(tmp_path)
    replace_by_folder(tmp_path / blocked)
    recorder = EndRecorder()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        recorder.record(end)
        await anyio.sleep(100)
        (tmp_path / blocked).rmdir()
        await anyio.sleep(2 * RETRY_INTERVAL)
        tasks.cancel_scope.cancel()
    events, records = read_end(tmp_path)
    assert events == [{"event": "failed", "time": end.time, "error": "no room"}]
    assert records == [{"record": "failed", "format": 2, "error": "no room", "time": end.time}]


@pytest.mark.virtual_clock
async def test_end_is_given_up_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = end_in(tmp_path)
    replace_by_folder(tmp_path / "metrics.jsonl")
    recorder = EndRecorder(limit=60.0)
    recorder.record(end)
    began = anyio.current_time()
    await recorder.drain(3600.0)
    assert 60.0 <= anyio.current_time() - began <= 60.0 + 2 * RETRY_INTERVAL
    first, last = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert str(tmp_path / "metrics.jsonl") in first
    assert "stays unrecorded after 60 s" in last


@pytest.mark.virtual_clock
async def test_end_is_tried_once_more_when_the_scheduler_ends(tmp_path: Path) -> None:
    end = end_in(tmp_path)
    replace_by_folder(tmp_path / "metrics.jsonl")
    recorder = EndRecorder()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await anyio.lowlevel.checkpoint()
        recorder.record(end)
        (tmp_path / "metrics.jsonl").rmdir()
        tasks.cancel_scope.cancel()
    assert [event["event"] for event in read_end(tmp_path)[0]] == ["failed"]


def test_events_after_the_end_do_not_remove_it(tmp_path: Path) -> None:
    with JobEvents(uuid.uuid4(), tmp_path) as report:
        report.failed("why").write()
        report.emit("metric", worker="w", round=1, name="loss", value=0.5)
    with EventFile(tmp_path / "metrics.jsonl") as events, Journal(tmp_path / "journal.jsonl") as journal:
        events.write("warning")
        journal.record("ended")
    events_read, records = read_end(tmp_path)
    assert [event["event"] for event in events_read] == ["failed", "metric", "warning"]
    assert [record["record"] for record in records] == ["failed", "ended"]
