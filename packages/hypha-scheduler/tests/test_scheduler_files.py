"""What a scheduler writes and posts: events, journal, models; and how jobs are handed in."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from click.testing import CliRunner

from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference
from hypha_proto.transfer import PullRequest, Refusal
from hypha_proto.update_file import TensorFile, TensorFileWriter, TensorInfo, UpdateMetadata, write_update
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.job_config import JobConfig, ModelTable, PreprocessorTable
from hypha_scheduler.journal import Journal, read_journal
from hypha_scheduler.metrics.status_bridge import EventFile, StatusBridge
from hypha_scheduler.reporting import JobReport
from hypha_scheduler.results import ResultModel, open_preprocessor, open_start_model, write_result
from hypha_scheduler.strategies.diloco.rounds import Measured, RoundClosed
from hypha_scheduler.submission.client import configured_socket, read_job
from hypha_scheduler.submission.server import serve_submissions, socket_path

PEER = PeerId.from_public_key(bytes(32))


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(20):
            await main()

    anyio.run(bounded, backend="trio")


def test_events_are_whole_lines_of_json(tmp_path: Path) -> None:
    with EventFile(tmp_path / "metrics.jsonl") as events:
        events.write("round", round=1, loss=float("nan"), counts={"a": 1})
        [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {"event": "round", "time": 0, "round": 1, "loss": None, "counts": {"a": 1}}


def test_a_journal_survives_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.record("accepted", job_id="x")
    with path.open("ab") as file:
        file.write(b'{"record": "rou')
    assert read_journal(path) == [{"record": "accepted", "job_id": "x"}]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_journal(tmp_path / "none") == []


def test_a_disk_that_fails_later_is_told_with_the_next_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.record_async("round", round=1)
        with monkeypatch.context() as broken:
            broken.setattr("hypha_scheduler.journal.os.fsync", fail)
            journal.record_async("round", round=2)
            assert journal._pending_sync is not None
            wait([journal._pending_sync], 10)
        with pytest.raises(OSError, match="Input/output"):
            journal.record_async("round", round=3)
    assert [record["round"] for record in read_journal(tmp_path / "journal.jsonl")] == [1, 2]


class _Bridge(BaseHTTPRequestHandler):
    """Answers 503 to the first `refusals` posts, and 422 to a metric called bad."""

    got: list[tuple[str, Any]]
    refusals = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = 200
        if _Bridge.refusals:
            _Bridge.refusals -= 1
            status = 503
        elif body["metric_name"] == "bad":
            status = 422
        else:
            self.got.append((self.path, body))
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(refusals: int = 0) -> Iterator[str]:
    _Bridge.got, _Bridge.refusals = [], refusals
    server = HTTPServer(("127.0.0.1", 0), _Bridge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def posting(bridge: StatusBridge) -> Iterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    def play(case: Callable[[], Awaitable[None]]) -> None:
        async def with_bridge() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bridge.run)
                await case()
                tasks.cancel_scope.cancel()

        run(with_bridge)

    yield play


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [record for record in caplog.records if record.name.startswith("hypha_scheduler")]
    return [record.getMessage() for record in own if record.levelname == "WARNING"]


def test_metrics_are_posted_to_the_bridge() -> None:
    with serving() as address, posting(bridge := StatusBridge(address)) as play:

        async def case() -> None:
            bridge.put("w", 2, "loss", 0.5)
            bridge.put("w", 2, "infinite", float("nan"))
            bridge.put("w", 3, "loss", 0.25, job_id="j")
            await bridge.drain(10)

        play(case)
    metric = {"worker_id": "w", "round": 2, "metric_name": "loss", "value": 0.5}
    assert _Bridge.got == [("/status", metric), ("/status", metric | {"round": 3, "value": 0.25, "job_id": "j"})]


def test_what_a_bridge_does_not_take_is_posted_again_and_what_it_finds_wrong_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(refusals=2) as address, posting(bridge := StatusBridge(address)) as play:

        async def case() -> None:
            for name in ("loss", "bad", "samples"):
                bridge.put("w", 1, name, 1.0)
            while len(_Bridge.got) < 2:
                await anyio.sleep(0.01)

        play(case)
    assert [body["metric_name"] for _, body in _Bridge.got] == ["loss", "samples"]
    assert ["HTTP 503" in warnings(caplog)[0], "HTTP 422" in warnings(caplog)[1]] == [True, True]


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_a_dead_bridge_costs_nothing_and_is_reported_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listener.listen(16)  # connections are made, and nobody ever reads from them
        bridge = StatusBridge(f"127.0.0.1:{listener.getsockname()[1]}", post_timeout=0.1)

        async def case() -> None:
            began = time.monotonic()
            for number in range(5000):
                bridge.put("w", number, "loss", 1.0)
            assert time.monotonic() - began < 20  # 500 s, did each wait for its post
            while not warnings(caplog):
                await anyio.sleep(0.01)
            await anyio.sleep(1.5)  # some repetitions
            began = time.monotonic()
            await bridge.drain(10)
            assert time.monotonic() - began < 8

        with posting(bridge) as play:
            play(case)
    assert len(warnings(caplog)) == 1


class _KeptPosts(StatusBridge):
    def __init__(self) -> None:
        super().__init__("nowhere:1")
        self.posts: list[tuple[str, int, str, float, str | None]] = []

    def put(self, worker: str, round_number: int, name: str, value: float, *, job_id: str | None = None) -> None:
        self.posts.append((worker, round_number, name, value, job_id))


def test_a_round_is_posted_worker_by_worker(tmp_path: Path) -> None:
    other, job_id = PeerId.from_public_key(bytes([1] * 32)), uuid.uuid4()
    bridge = _KeptPosts()
    with JobReport(tmp_path, bridge) as report:
        report.accepted(job_id, {})
        report.measured(Measured(PEER, 3, {"loss": 0.5, "samples_per_second": 80.0, "samples": 1.0}))
        report.round_closed(
            RoundClosed(3, {PEER: 96, other: 40}, {PEER: 6, other: 5}, {PEER: 0.0, other: 1.0}, 4.0, 0.5), 1
        )
    posted = {
        (worker, name): value for worker, number, name, value, job in bridge.posts if (number, job) == (3, str(job_id))
    }
    assert posted == {
        (str(PEER), "loss"): 0.5,
        (str(PEER), "samples_per_second"): 80.0,
        (str(PEER), "samples"): 96,
        (str(PEER), "batch_size"): 16.0,
        (str(PEER), "utilisation"): 1.0,
        (str(other), "samples"): 40,
        (str(other), "batch_size"): 8.0,
        (str(other), "utilisation"): 0.75,
    }
    assert len(bridge.posts) == len(posted)


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("F32", (3,))}, {}) as writer:
        writer.write("w", np.ones(3, np.float32))
    return folder


def test_a_local_model_is_copied_and_served_file_by_file(tmp_path: Path) -> None:
    source = make_model(tmp_path / "start")

    async def case() -> None:
        model = ModelTable(path=source, type="vision-classification")
        job_id = uuid.UUID(int=5)
        start = await open_start_model(model, tmp_path / "copy", job_id, PEER)
        assert isinstance(start.reference, PeersReference)
        assert start.reference.filenames == ("config.json", "model.safetensors")
        found = start.resolve(PullRequest(dataset=f"{job_id}/model", index=1))
        assert isinstance(found, PullSource)
        assert found.source == source / "model.safetensors"
        assert isinstance(start.resolve(PullRequest(dataset=f"{job_id}/model", index=2)), Refusal)
        assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]

    run(case)


def test_a_local_preprocessor_is_served_file_by_file(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.md"):
        (source / name).write_text("{}")

    async def case() -> None:
        job_id, table = uuid.UUID(int=5), PreprocessorTable(path=source)
        opened = await open_preprocessor(table, tmp_path / "copy", job_id, PEER)
        assert opened is not None
        (source / "tokenizer.json").write_text("changed since")
        assert isinstance(opened.reference, PeersReference)
        assert opened.reference.filenames == ("tokenizer.json", "tokenizer_config.json")
        found = opened.resolve(PullRequest(dataset=f"{job_id}/preprocessor", index=0))
        assert isinstance(found, PullSource)
        assert isinstance(found.source, Path)
        assert found.source.read_text() == "{}"
        assert await open_preprocessor(None, tmp_path / "none", job_id, PEER) is None
        with pytest.raises(JobFailedError, match=r"missing\.json"):
            lacking = PreprocessorTable(path=source, filenames=("missing.json",))
            await open_preprocessor(lacking, tmp_path / "other", job_id, PEER)

    run(case)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    async def case() -> None:
        model = ModelTable(path=tmp_path, type="vision-classification")
        with pytest.raises(JobFailedError, match=r"holds no \*\.safetensors"):
            await open_start_model(model, tmp_path / "copy", uuid.UUID(int=5), PEER)

    run(case)


def update(path: Path, number: int, name: str = "w") -> Path:
    write_update(path, {name: (3,)}, [(name, np.full(3, number, np.float32))], UpdateMetadata(round=number))
    return path


def weights(folder: Path) -> list[float]:
    with TensorFile(folder / "model.safetensors") as file:
        values: list[float] = file.stored("w").tolist()
        return values


def test_outer_updates_are_added_once_and_in_order(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    async def case() -> None:
        result = ResultModel(folder, every=2)
        await result.apply_update(update(tmp_path / "u1", 1), 1)
        assert weights(folder) == [1.0] * 3
        await result.apply_update(update(tmp_path / "again", 1), 1)
        await result.apply_update(update(tmp_path / "u2", 2), 2)
        assert weights(folder) == [4.0] * 3
        await result.apply_update(update(tmp_path / "u3", 3), 3)
        await result.finish()
        assert weights(folder) == [7.0] * 3
        assert result.round == 3

    run(case)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_trained_model_is_on_the_disk_before_the_job_is_said_to_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = make_model(tmp_path / "model"), []
    monkeypatch.setattr("os.fsync", lambda fd: kept.append(os.fstat(fd).st_ino))

    async def case() -> None:
        result = ResultModel(folder)
        await result.apply_update(update(tmp_path / "u1", 1), 1)
        await result.finish()
        write_result(tmp_path / "result.json", {"rounds": 1})

    run(case)
    wanted = (folder / "model.safetensors", folder / "config.json", folder, tmp_path / "result.json", tmp_path)
    assert {path.stat().st_ino for path in wanted} <= set(kept)
    assert weights(folder) == [2.0, 2.0, 2.0]


def test_an_update_that_does_not_fit_fails_the_job(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")

    async def case() -> None:
        with pytest.raises(JobFailedError, match="cannot be added to the model"):
            await ResultModel(folder).apply_update(update(tmp_path / "u1", 1, "stranger"), 1)

    run(case)


JOB = """
[scheduler.job]
dataset = "digits"
model = { path = "start", type = "vision-classification" }
inner_optimizer = { learning_rate = 1e-3 }
"""


def submit_with(
    tmp_path: Path, text: str, run_job: Callable[[JobConfig, uuid.UUID], Awaitable[Path]]
) -> tuple[int, str]:
    """Run `submit` against a scheduler that conducts jobs in this way; exit code and output."""
    file = tmp_path / "job.toml"
    file.write_text(text)
    outcome: list[tuple[int, str]] = []

    def submit() -> None:
        done = CliRunner().invoke(main, ["submit", str(file), "--socket", str(socket_path(tmp_path / "r"))])
        outcome.append((done.exit_code, done.output))

    async def case() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_submissions, tmp_path / "r", run_job)
            while not await anyio.Path(socket_path(tmp_path / "r")).exists():
                await anyio.sleep(0.01)
            await anyio.sleep(0.1)  # the name is there a moment before the socket listens
            await anyio.to_thread.run_sync(submit)
            tasks.cancel_scope.cancel()

    run(case)
    assert not socket_path(tmp_path / "r").exists()
    return outcome[0]


def test_a_job_is_handed_to_a_running_scheduler(tmp_path: Path) -> None:
    taken: list[JobConfig] = []
    ids: list[uuid.UUID] = []

    async def run_job(job: JobConfig, job_id: uuid.UUID) -> Path:
        taken.append(job)
        ids.append(job_id)
        return Path("/somewhere/result.json")

    code, output = submit_with(tmp_path, JOB, run_job)
    assert code == 0
    accepted, result = (json.loads(line) for line in output.splitlines())
    assert accepted == {"accepted": True, "job_id": str(ids[0]), "directory": str(tmp_path / "r" / str(ids[0]))}
    assert result == {"result": "/somewhere/result.json"}
    assert taken[0].model.path == tmp_path / "start"
    assert read_job(tmp_path / "job.toml")["dataset"] == "digits"


def test_a_job_that_fails_or_is_none_says_so(tmp_path: Path) -> None:
    async def run_job(job: JobConfig, job_id: uuid.UUID) -> Path:
        raise JobFailedError("no workers at all")

    code, output = submit_with(tmp_path, JOB, run_job)
    assert code == 1
    assert "no workers at all" in output
    code, output = submit_with(tmp_path, JOB.replace("dataset", "datset"), run_job)
    assert code == 2
    assert "datset" in output


def test_a_date_in_a_job_goes_over_as_it_is_written(tmp_path: Path) -> None:
    taken: list[JobConfig] = []

    async def run_job(job: JobConfig, _job_id: uuid.UUID) -> Path:
        taken.append(job)
        return Path("/somewhere/result.json")

    code, output = submit_with(
        tmp_path, JOB.replace('path = "start"', "path = 'start', revision = 2024-01-31"), run_job
    )
    assert code == 0, output
    assert taken[0].model.revision == "2024-01-31"


def test_the_socket_is_where_the_scheduler_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    config = tmp_path / "etc" / "scheduler.toml"
    monkeypatch.chdir(tmp_path)
    for text, runs in (
        ("", tmp_path / "runs"),
        ('output_dir = "out"', tmp_path / "etc" / "out"),
        ('[scheduler]\noutput_dir = "/far"', Path("/far")),
    ):
        config.write_text(text)
        assert configured_socket(config).resolve() == socket_path(runs)


def test_submit_without_a_scheduler_is_unreachable(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    done = CliRunner().invoke(main, ["submit", str(file), "--socket", str(tmp_path / "none")])
    assert done.exit_code == 3
    assert "no scheduler takes jobs at" in done.output
