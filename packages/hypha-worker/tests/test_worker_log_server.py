"""Logs that a worker shows to schedulers: whose they are, positions, bounds, and what is hidden in them."""

from __future__ import annotations

import uuid
from pathlib import Path

import anyio
import pytest

from hypha_proto.ids import PeerId
from hypha_proto.job_logs import MAX_TEXT, ListLogs, LogPart, ReadLog
from hypha_worker.logs.redaction import LogRedaction, secret_values
from hypha_worker.logs.run_log import LogFolder
from hypha_worker.logs.server import LogServer

JOB = uuid.UUID("01234567-0000-0000-0000-000000000000")
OWN = PeerId(bytes.fromhex("002408011220") + bytes(range(32)))
STRANGER = PeerId(bytes.fromhex("002408011220") + bytes(32))


@pytest.fixture
def logs(tmp_path: Path) -> LogFolder:
    return LogFolder(tmp_path / "logs", max_size=1000, keep=3)


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
