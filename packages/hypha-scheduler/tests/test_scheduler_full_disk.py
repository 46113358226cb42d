"""Files of a job on a disk without room: lines stay whole, the end is recorded once there is room.

A limit of the file size (RLIMIT_FSIZE) stands in for a full disk: it also takes the part of a line that fits, and
fails the rest. It holds for a process, so this takes place in one of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hypha_scheduler.jobs.events import RETRY_INTERVAL, EndRecord, EndRecorder, EventFile, JobEvents
from hypha_scheduler.jobs.journal import Journal, read_journal

pytestmark = pytest.mark.virtual_clock

WITH_LIMIT = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""


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
