"""The output of jobs: bounded files, the worker's own log, the command that prints them, and their server."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from hypha_net.testing import simulate
from hypha_proto.ids import PeerId
from hypha_proto.job_logs import MAX_TEXT, ListLogs, LogPart, ReadLog
from hypha_worker.cli import main, printable
from hypha_worker.executors.process.output_log import LAST_LINES, MAX_LINE_RATE, OutputLog
from hypha_worker.logs.reader import LogNotFoundError, find_log, follow_log, list_logs, read_log
from hypha_worker.logs.redaction import LogRedaction, secret_values
from hypha_worker.logs.run_log import LogFolder, RunLog
from hypha_worker.logs.server import LogServer

JOB = uuid.UUID("01234567-0000-0000-0000-000000000000")
OTHER = uuid.UUID("01239999-0000-0000-0000-000000000000")
InLab = Callable[..., Any]


@pytest.fixture
def logs(tmp_path: Path) -> LogFolder:
    return LogFolder(tmp_path / "logs", max_size=1000, keep=3)


def content(log: RunLog, tail: int | None = None) -> bytes:
    return b"".join(read_log(log.path, tail))


def write(log: RunLog, *parts: bytes) -> RunLog:
    with log:
        for part in parts:
            log.write(part)
    return log


def numbered(count: int, start: int = 0) -> bytes:
    return b"".join(b"line %04d\n" % number for number in range(start, start + count))


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("block", [1, 7, 64, 4000])
def test_a_log_is_bounded_and_keeps_the_newest_lines_whole(logs: LogFolder, block: int) -> None:
    output = numbered(400)
    log = write(logs.new_log(JOB, "t"), *(output[at : at + block] for at in range(0, len(output), block)))
    files = sorted(path.name for path in log.path.parent.iterdir())
    assert files == ["t.log", "t.log.1"]
    kept = content(log)
    assert 500 <= len(kept) <= 1000
    assert output.endswith(kept)
    assert block == 1 or kept.startswith(b"line "), kept[:20]  # bytes one by one are not whole lines


def test_a_line_that_is_longer_than_a_log_is_kept_as_far_as_it_fits(logs: LogFolder) -> None:
    log = write(logs.new_log(JOB, "t"), b"first\n", b"x" * 5000, b"end\n")
    kept = content(log)
    assert len(kept) <= 1000
    assert kept.endswith(b"xxxend\n")


def test_logs_are_for_their_owner_only(logs: LogFolder) -> None:
    before = os.umask(0)
    try:
        log = write(logs.new_log(JOB, "t"), numbered(400))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [logs.folder, *logs.folder.rglob("*")]}
    assert modes == {"logs": 0o700, str(JOB): 0o700, "t.log": 0o600, "t.log.1": 0o600}
    assert log.path.parent == logs.folder / str(JOB)


def test_only_so_many_logs_of_ended_runs_are_kept(logs: LogFolder) -> None:
    running = logs.new_log(JOB, "runs")
    with running:
        running.write(b"going on\n")
        for number in range(6):
            write(logs.new_log(JOB if number < 3 else OTHER, f"t{number}"), numbered(200))
        assert [str(log) for log in list_logs(logs.folder)] == [f"{JOB}/runs", *(f"{OTHER}/t{n}" for n in (3, 4, 5))]
    assert [str(log) for log in list_logs(logs.folder)] == [f"{JOB}/runs", f"{OTHER}/t4", f"{OTHER}/t5"]
    write(logs.new_log(OTHER, "t6"), b"x")
    write(logs.new_log(OTHER, "t7"), b"x")
    write(logs.new_log(OTHER, "t8"), b"x")
    assert os.listdir(logs.folder) == [str(OTHER)]


def test_logs_of_an_earlier_worker_are_removed_when_there_are_too_many(logs: LogFolder) -> None:
    written = [write(logs.new_log(JOB, f"t{number}"), b"x") for number in range(3)]
    for age, log in enumerate(reversed(written)):
        os.utime(log.path, (1000 - age, 1000 - age))
    with logs.new_log(JOB, "of another worker") as running:
        os.utime(running.path, (1, 1))
        later = LogFolder(logs.folder, logs.max_size, keep=1)
        later.open()
        assert [log.run for log in list_logs(logs.folder)] == ["of another worker", "t2"]


def test_without_logs_a_worker_starts(tmp_path: Path) -> None:
    LogFolder(tmp_path / "none", 1000, 3).open()
    assert not (tmp_path / "none").exists()


def test_several_runs_of_a_name_have_files_of_their_own(logs: LogFolder) -> None:
    first, second = (write(logs.new_log(JOB, "t"), text) for text in (b"first", b"second"))
    assert [log.path.name for log in (first, second)] == ["t.log", "t@2.log"]
    assert (content(first), content(second)) == (b"first", b"second")


# -------------------------------------------------------------------------------------------------- finding and reading


@pytest.fixture
def known(logs: LogFolder) -> LogFolder:
    made = LogFolder(logs.folder, 1000, 100)
    runs = [(JOB, "count"), (JOB, "count[1]"), (JOB, "sum"), (JOB, "sum"), (OTHER, "8f3e"), (OTHER, "8f3e")]
    for age, (job, name) in enumerate(runs):
        log = write(made.new_log(job, name), f"{name} {age}\n".encode() * 3)
        os.utime(log.path, (1000 + age, 1000 + age))
    return made


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (f"{JOB}/count", b"count 0\n"),
        ("01234/count[", b"count[1] 1\n"),
        ("01234/s", b"sum 3\n"),
        ("01234/sum@2", b"sum 3\n"),
        ("01234/sum@1", b"sum 2\n"),
        ("01239", b"8f3e 5\n"),
        ("01239/8", b"8f3e 5\n"),
    ],
)
def test_a_log_is_found_by_the_beginning_of_its_name(known: LogFolder, wanted: str, found: bytes) -> None:
    path = find_log(known.folder, wanted).path
    assert b"".join(read_log(path)) == found * 3
    assert b"".join(read_log(path, tail=2)) == found * 2
    assert b"".join(read_log(path, tail=0)) == b""


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ("01234", {"count", "count[1]", "sum", "sum@2"}),
        ("0123", {"count", "count[1]", "sum", "sum@2", "8f3e", "8f3e@2"}),
        ("01234/cou", {"count", "count[1]"}),
        ("no", {"count", "count[1]", "sum", "sum@2", "8f3e", "8f3e@2"}),
        ("../..", {"count", "count[1]", "sum", "sum@2", "8f3e", "8f3e@2"}),
    ],
)
def test_what_means_no_single_log_is_refused_with_those_that_may_be_meant(
    known: LogFolder, wanted: str, matches: set[str]
) -> None:
    with pytest.raises(LogNotFoundError) as raised:
        find_log(known.folder, wanted)
    assert {log.run for log in raised.value.matches} == matches


@pytest.mark.parametrize("tail", [None, 1])
def test_a_log_is_followed_over_rotations_until_its_run_ends(logs: LogFolder, tail: int | None) -> None:
    output = numbered(200)
    blocks = iter([output[at : at + 90] for at in range(0, len(output), 90)])
    log = logs.new_log(JOB, "t")

    def write_more() -> None:
        block = next(blocks, None)
        if block is None:
            log.__exit__(None, None, None)
        else:
            log.write(block)

    with log:
        write_more()
        followed = b"".join(follow_log(log.path, write_more, tail))
    assert followed == (output if tail is None else output[80:])


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def run(worker_toml: str, known: LogFolder) -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(main, ["logs", "--config", worker_toml, *arguments])


def test_the_command_prints_a_log(run: Callable[..., Result]) -> None:
    assert run("01239").stdout == "8f3e 5\n" * 3
    assert run("01239", "--tail", "1").stdout == "8f3e 5\n"
    assert run("01234/sum", "--follow").stdout == "sum 3\n" * 3  # it has ended
    listed = run().stdout.splitlines()
    assert [line.split()[0] for line in listed][:2] == [f"{JOB}/count", f"{JOB}/count[1]"]
    assert not any("running" in line for line in listed)


def test_the_command_lists_what_may_be_meant(run: Callable[..., Result], known: LogFolder) -> None:
    with known.new_log(JOB, "count[2]"):
        ambiguous = run("01234/cou")
    assert ambiguous.exit_code == 2
    for name in ("count", "count[1]", "count[2]"):
        assert f"{JOB}/{name} " in ambiguous.stderr
    assert "running" in ambiguous.stderr
    assert "01239999" not in ambiguous.stderr
    unknown = run("ffff")
    assert unknown.exit_code == 2
    assert f"there is no log of 'ffff'; {known.folder} has these:" in unknown.stderr


def test_the_command_says_where_no_log_is(run: Callable[..., Result], known: LogFolder) -> None:
    shutil.rmtree(known.folder)
    listed = run()
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr == f"no job has written a log in {known.folder} yet\n"
    unknown = run("ffff")
    assert unknown.exit_code == 2
    assert f"there is no log of 'ffff', nor of any other job, in {known.folder}" in unknown.stderr


def test_output_cannot_control_a_terminal() -> None:
    assert printable(b"50%\r100%\n\x1b[2J\tdone\x9b \xff") == "50%\r100%\n\\x1b[2J\tdone� �"


# --------------------------------------------------------------------------------------------------- the worker's log


def record(log: RunLog | None, *blocks: tuple[float, bytes], end: float = 0.0) -> OutputLog:
    """Record blocks, each after a pause, and the end of the output after another one."""
    output = OutputLog(log, "job/lease")

    async def run() -> None:
        sender, receiver = anyio.create_memory_object_stream[bytes](10)
        stream: Any = SimpleNamespace(receive=lambda _max_bytes: receiver.receive())
        async with anyio.create_task_group() as tasks, sender:
            tasks.start_soon(output.read, stream)
            for pause, block in blocks:
                await anyio.sleep(pause)
                await sender.send(block)
            await anyio.sleep(end)

    simulate(run)
    return output


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "hypha_worker")
    return lambda: [record.getMessage().removeprefix("[job/lease] ") for record in caplog.records]


def test_the_workers_log_gets_few_lines_and_the_file_all(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    log = LogFolder(tmp_path, 10**6, 3).new_log(JOB, "t")
    output = record(log, (0, numbered(1434)), (0.5, numbered(1, 1434)), (2.0, numbered(1, 1435)))
    lines = logged()
    assert lines[:MAX_LINE_RATE] == numbered(MAX_LINE_RATE).decode().splitlines()
    assert lines[MAX_LINE_RATE:] == [
        f"1,235 lines were left out of this log; they are in {log.path}",
        "line 1435",
    ]
    assert content(log) == numbered(1436)
    assert output.last_lines(failed=False) == tuple(numbered(LAST_LINES, 1436 - LAST_LINES).decode().splitlines())


def test_what_was_left_out_is_told_while_a_job_is_silent_and_at_its_end(logged: Callable[[], list[str]]) -> None:
    told: list[float] = []

    class Clock(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if "left out" in entry.getMessage():
                told.append(anyio.current_time())

    logger, clock = logging.getLogger("hypha_worker"), Clock()
    logger.addHandler(clock)
    try:
        record(None, (0, numbered(300)), (0, numbered(300)), end=3600)
        record(None, (0, numbered(300)))
    finally:
        logger.removeHandler(clock)
    assert [round(time, 3) for time in told] == [1.0, 0.0]
    assert logged()[-1] == "100 lines were left out of this log; they are stored nowhere"


def test_a_steady_job_is_logged_completely(logged: Callable[[], list[str]]) -> None:
    blocks = [(1.0, numbered(MAX_LINE_RATE, MAX_LINE_RATE * second)) for second in range(5)]
    record(None, *blocks)
    assert logged() == numbered(5 * MAX_LINE_RATE).decode().splitlines()


def test_lines_are_put_together_and_progress_bars_are_cut(logged: Callable[[], list[str]]) -> None:
    bar = b"".join(b"\r%d%%" % percent for percent in range(3000))
    output = record(None, (0, b"one\ntw"), (0, b"o\n\n\r\nERROR x.y: bad\n"), (0, bar), (0, b"last"))
    assert logged() == ["one", "two", "ERROR x.y: bad", "2999%", "last"]
    assert output.last_lines(failed=True) == ("ERROR x.y: bad", "one", "two", "2999%", "last")


def test_a_traceback_before_a_logged_error_is_in_the_file_only() -> None:
    lines = (
        b"before\nTraceback (most recent call last):\n  File x, line 1\nKeyError: 3\nERROR x.y: KeyError: 3\nafter\n"
    )
    assert record(None, (0.0, lines)).last_lines(failed=True) == ("ERROR x.y: KeyError: 3", "before", "after")
    frames = b"".join(b"  File x, line %d\n    call()\n" % number for number in range(60))
    long = (
        b"before\n"
        + 2 * (b"Traceback (most recent call last):\n" + frames + b"KeyError: 3\n\n")
        + b"ERROR x.y: KeyError: 3\n"
    )
    assert record(None, (0.0, long)).last_lines(failed=True) == ("ERROR x.y: KeyError: 3",)
    handled = b"Traceback (most recent call last):\n  File x\nKeyError: 3\nnext\nERROR x.y: bad\n"
    assert "KeyError: 3" in record(None, (0.0, handled)).last_lines(failed=True)
    crash = b"ERROR x.y: bad\nTraceback (most recent call last):\nKeyError: 3\n"
    assert record(None, (0.0, crash)).last_lines(failed=True)[1:] == (
        "Traceback (most recent call last):",
        "KeyError: 3",
    )


# ------------------------------------------------------------------------------------------------------------- jobs


async def test_output_is_stored_outside_the_jobs_folder(in_lab: InLab, tmp_path: Path) -> None:
    async with in_lab() as lab:
        lease = await lab.start("print('hello'); print(sorted(os.listdir(work_dir)), oct(os.stat('job.json').st_mode))")
        await lab.scheduler.ended()
        job = str(lab.scheduler.job_id)
        log = find_log(tmp_path / "work" / "logs", job[:8])
        assert (log.job, log.run, log.has_ended) == (job, lab.scheduler.task_on(lease), True)
        first, second = b"".join(read_log(log.path)).decode().splitlines()
        assert first == "hello"
        assert "log" not in second
        assert second.endswith(" 0o100600")


@pytest.mark.parametrize("fault", ["full", "no folder"])
async def test_a_disk_without_room_for_logs_ends_no_job(
    in_lab: InLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level(logging.INFO, "hypha_worker")
    written = itertools.count()

    def fail(*_: object) -> int:
        next(written)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with in_lab() as lab:
        if fault == "full":
            monkeypatch.setattr("hypha_worker.logs.run_log.os.write", fail)
        else:
            (tmp_path / "work" / "logs").touch()
        await lab.start("for number in range(300): print('line', number, flush=True)")
        end = await lab.scheduler.ended()
        monkeypatch.undo()
        assert end.outcome == "finished"
    assert caplog.text.count("output is missing in") == 1
    assert "line 0" in caplog.text
    assert "left out of this log" not in caplog.text or "is incomplete" in caplog.text
    assert fault != "full" or next(written) > 0


OWN = PeerId(bytes.fromhex("002408011220") + bytes(range(32)))
STRANGER = PeerId(bytes.fromhex("002408011220") + bytes(32))


def read(logs: LogFolder, position: int = 0, limit: int = MAX_TEXT, peer: PeerId = OWN) -> LogPart:
    server = LogServer(logs, LogRedaction(["owner-secret"]))

    async def ask() -> LogPart:
        return await server.read_log(peer, ReadLog(JOB, "t", position, limit))

    return anyio.run(ask)


def test_a_log_is_shown_to_its_scheduler_only(logs: LogFolder) -> None:
    with logs.new_log(JOB, "t", OWN) as log:
        log.write(b"one\n")
    with logs.new_log(JOB, "of nobody") as log:
        log.write(b"two\n")
    later = LogFolder(logs.folder, 1000, 3)  # after a restart
    server = LogServer(later, LogRedaction())
    [entry] = anyio.run(server.list_logs, OWN, ListLogs(JOB)).logs
    assert (entry.run, entry.start, entry.end, entry.ended) == ("t", 0, 4, True)
    assert anyio.run(server.list_logs, STRANGER, ListLogs(JOB)).logs == ()
    assert anyio.run(server.list_logs, OWN, ListLogs(uuid.uuid4())).logs == ()
    assert read(later) == LogPart(known=True, text="one\n", start=0, next=4)
    assert not read(later, peer=STRANGER).known
    (log.path.parent / "t.log.origin").write_text("damaged")
    assert not read(later).known


def test_positions_stay_valid_when_a_half_is_removed(logs: LogFolder) -> None:
    output = b"".join(b"line %04d\n" % number for number in range(400))
    with logs.new_log(JOB, "t", OWN) as log:
        for at in range(0, len(output), 70):
            log.write(output[at : at + 70])
        part = read(logs)
        assert part.start > 0
        assert part.next == len(output)
        assert part.text.encode() == output[part.start :]
        log.write(b"line 0400\nunfin")
        assert read(logs, part.next).text == "line 0400\n"
        following = read(logs, part.next).next
        assert read(logs, following) == LogPart(known=True, text="", start=following, next=following)
    assert read(logs, following).text == "unfin"
    assert {path.name for path in log.path.parent.iterdir()} == {"t.log", "t.log.1", "t.log.origin"}


def test_a_text_begins_and_ends_between_lines(logs: LogFolder) -> None:
    with logs.new_log(JOB, "t", OWN) as log:
        log.write(b"see https://user:password@host/x?sig=1\nnext\n" + b"word " * 30 + b"https://user:word@host\nend\n")
    whole = read(logs).text
    assert "password" not in whole
    assert "https://***@host/x?***" in whole
    for position in range(1, 39):  # within the first line
        assert read(logs, position).text.startswith("next\n")
    long = read(logs, 44, limit=165)  # ends within the user information
    assert "user:" not in long.text
    assert long.text.startswith("word word")
    assert read(logs, long.next).text == "end\n"
    assert read(logs, 0, limit=0).next == 0
    assert read(logs, 1 << 60).text == ""


def test_secrets_are_hidden_and_numbers_are_not() -> None:
    environment = {"WANDB_API_KEY": "0a1b2c3d", "DB_PASS": "of-the-db", "PATH": "/usr/bin", "A_TOKEN": "x"}
    clean = LogRedaction(secret_values(environment)).clean
    assert clean("key 0a1b2c3d and of-the-db in /usr/bin") == "key *** and *** in /usr/bin"
    assert clean("hf_abcdefghijklmnopqrstuv") == "***"
    assert clean("Authorization: Bearer abcdefghijkl") == "Authorization: Bearer ***"
    assert clean('{"token": "abc", "password": null}') == '{"token": ***, "password": null}'
    assert clean("HF_TOKEN=abc tokens=1024 token_count: 17") == "HF_TOKEN=*** tokens=1024 token_count: 17"
    assert clean("a" * 200_000 + "://" + "b" * 50_000).startswith("aaa")  # takes linear time
