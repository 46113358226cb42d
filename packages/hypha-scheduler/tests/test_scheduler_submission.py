"""Submission of jobs to a running scheduler over its Unix socket."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.stored_model import write_model
from support.waiting import run, until

from hypha_proto.record_file import EVENTS
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.submission.client import configured_socket, read_job, socket_path
from hypha_scheduler.submission.server import SubmissionServer, parse_job

JOB = """
[scheduler.job]
dataset = "digits"
model = { path = "start", type = "vision-classification" }
inner_optimizer = { learning_rate = 1e-3 }
"""


def submit_with(
    tmp_path: Path, text: str, run_job: Callable[[DilocoJobConfig, uuid.UUID], Awaitable[Path]], runs: str = "r"
) -> tuple[int, str]:
    """Run `submit` against a scheduler with this `run_job`; return exit code and output. `start` holds a model."""
    path = socket_path(tmp_path / runs)
    write_model(tmp_path / "start")
    file = tmp_path / "job.toml"
    file.write_text(text)
    outcome: list[tuple[int, str]] = []

    def submit() -> None:
        done = CliRunner().invoke(main, ["submit", str(file), "--socket", str(path)])
        outcome.append((done.exit_code, done.output))

    async def case() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SubmissionServer(tmp_path / runs, run_job, run_job).serve)
            await until(lambda: anyio.Path(path).exists(), 60)
            await anyio.to_thread.run_sync(submit)
            tasks.cancel_scope.cancel()

    run(case)
    assert not path.exists()
    return outcome[0]


def test_submit_names_changes_of_the_members_on_standard_error(tmp_path: Path) -> None:
    async def run_job(job: DilocoJobConfig, job_id: uuid.UUID) -> Path:
        directory = tmp_path / "r" / str(job_id)
        directory.mkdir(exist_ok=True)
        with EventFile(directory / EVENTS) as file:
            file.write("worker_late", worker="12D3a", round=2, reason="round 2 continued without it after 31.2 s")
        return directory

    code, output = submit_with(tmp_path, JOB, run_job)
    first, second, third = output.splitlines()
    assert code == 0
    assert second == "worker late: …12D3a, round 2: round 2 continued without it after 31.2 s"
    assert "accepted" in first
    assert "result" in third


@pytest.mark.parametrize("runs", ["r", "a-path-that-is-longer-than-that-of-a-socket-may-be" * 3])
def test_submit_runs_a_job_on_a_running_scheduler(tmp_path: Path, runs: str) -> None:
    received: list[tuple[DilocoJobConfig, uuid.UUID]] = []

    async def run_job(job: DilocoJobConfig, job_id: uuid.UUID) -> Path:
        received.append((job, job_id))
        return Path("/somewhere/result.json")

    dated = JOB.replace('path = "start"', "path = 'start', revision = 2024-01-31")
    code, output = submit_with(tmp_path, dated, run_job, runs)
    assert code == 0, output
    [(job, job_id)] = received
    accepted, result = (json.loads(line) for line in output.splitlines())
    assert accepted == {"accepted": True, "job_id": str(job_id), "directory": str(tmp_path / runs / str(job_id))}
    assert result == {"result": "/somewhere/result.json"}
    assert (job.model.path, job.model.revision) == (tmp_path / "start", "2024-01-31")
    assert read_job(tmp_path / "job.toml")["dataset"] == "digits"


@pytest.mark.parametrize("serve", ["serve = false, ", ""])
def test_submit_warns_of_a_token_that_workers_would_get(tmp_path: Path, serve: str) -> None:
    source = f'{{ repository = "org/model", token = "hf_secret", {serve}'
    code, output = submit_with(tmp_path, JOB.replace('{ path = "start", ', source), succeed)
    assert code == 0
    assert "hf_secret" not in output
    accepted, *others = output.splitlines()
    warnings = json.loads(accepted).get("warnings", [])
    assert [line for line in others if line.startswith("warning: ")] == [f"warning: {line}" for line in warnings]
    assert len(warnings) == (1 if serve else 0)
    for line in warnings:
        assert "model.token is handed to every worker that this job leases" in line
        assert "leave model.serve out" in line


def test_submit_reports_failed_and_invalid_jobs(tmp_path: Path) -> None:
    async def run_job(job: DilocoJobConfig, job_id: uuid.UUID) -> Path:
        raise JobFailedError("no workers at all")

    code, output = submit_with(tmp_path, JOB, run_job)
    assert code == 1
    assert "no workers at all" in output
    code, output = submit_with(tmp_path, JOB.replace("dataset", "datset"), run_job)
    assert code == 2
    assert "datset" in output


def test_socket_is_in_the_output_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_submit_without_a_scheduler_exits_with_3(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    done = CliRunner().invoke(main, ["submit", str(file), "--socket", str(tmp_path / "none")])
    assert done.exit_code == 3
    assert "no scheduler takes jobs at" in done.output


async def succeed(job: DilocoJobConfig, job_id: uuid.UUID) -> Path:
    return Path("/somewhere/result.json")


async def never_run(job: DilocoJobConfig, job_id: uuid.UUID) -> Path:
    raise AssertionError("the job is invalid")


def test_everything_wrong_with_a_job_is_reported_at_once(tmp_path: Path) -> None:
    text = """
    [scheduler.job]
    dataset = "digits"
    outer_optimiser = { learning_rate = 0.7 }
    [scheduler.job.model]
    path = "strat"
    type = "vision-classification"
    [scheduler.job.inner_optimizer]
    learning_rate = 1e308
    wieght_decay = 0.1
    [scheduler.job.rounds]
    evaluate_every = 2
    [scheduler.job.preprocessor]
    path = "tokeniser"
    [scheduler.job.resources]
    worker = { gpus = 8 }
    """
    code, output = submit_with(tmp_path, text, never_run)
    assert code == 2
    assert "outer_optimiser: is not a key\n    did you mean outer_optimizer?" in output
    assert "inner_optimizer.learning_rate = 1e+308: input should be less than or equal to 100\n" in output
    assert "inner_optimizer.wieght_decay: is not a key of [inner_optimizer]\n    did you mean weight_decay?" in output
    assert "name the dataset to evaluate on in dataset.evaluation" in output
    assert "'gpus' is not a key here; did you mean gpu?" in output
    assert f"model.path: there is no directory {tmp_path / 'strat'} at the scheduler; " in output
    assert f"preprocessor.path: there is no directory {tmp_path / 'tokeniser'} at the scheduler; " in output


def test_missing_files_alone_refuse_a_job(tmp_path: Path) -> None:
    lacking = JOB.replace('path = "start"', 'path = "start", filenames = ["a.safetensors"]')
    code, output = submit_with(tmp_path, lacking, never_run)
    assert code == 2
    assert f"model.path: {tmp_path / 'start'} holds no a.safetensors, which filenames lists" in output


def test_missing_keys_are_named_without_environment_variables(tmp_path: Path) -> None:
    code, output = submit_with(tmp_path, JOB.replace("inner_optimizer = ", "outer_optimizer = "), never_run)
    assert code == 2
    assert "inner_optimizer: is missing\n    set inner_optimizer in the file. Inner optimizer" in output
    assert "HYPHA_" not in output


@pytest.mark.parametrize("accepts", [True, False])
def test_submit_names_the_job_whose_scheduler_is_killed(tmp_path: Path, accepts: bool) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(20)

        def accept_and_die() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(4096):
                    pass
                if accepts:
                    connection.sendall(b'{"accepted": true, "job_id": "j-1", "directory": "/runs/j-1"}\n')

        with ThreadPoolExecutor(1) as pool:
            dying = pool.submit(accept_and_die)
            done = CliRunner().invoke(main, ["submit", str(file), "--socket", str(tmp_path / "s")])
            dying.result(20)
    assert done.exit_code == 3
    if accepts:
        assert "the scheduler ended before job j-1 did; continue it with `hypha-scheduler resume " in done.output
        assert "/runs/j-1 --config FILE`" in done.output
    else:
        assert "the scheduler ended before it accepted the job; start it" in done.output


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "[" * 70 + "]" * 70, "a." * 2000 + "a = 1"])
def test_a_nested_job_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    done = CliRunner().invoke(main, ["submit", str(tmp_path / "job.toml"), "--socket", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "nested" in done.output


NESTED = [
    b"[" * 100_000,
    b'{"job": ' * 12_500,
    b'{"job": {"dataset": ' + b"[" * 500 + b"]" * 500 + b"}}",
    b'{"job": {"model": ' + b'{"a": ' * 100 + b"1" + b"}" * 102,
]


@pytest.mark.parametrize("nested", NESTED, ids=["100 kB of arrays", "100 kB of objects", "within a job", "a table"])
async def test_nested_json_on_the_socket_is_refused_and_the_scheduler_goes_on(tmp_path: Path, nested: bytes) -> None:
    async def send(data: bytes) -> list[dict[str, object]]:
        path = socket_path(tmp_path / "r")
        async with await anyio.connect_unix(path) as stream:
            await stream.send(data)
            await stream.send_eof()
            answer = b""
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    answer += await stream.receive()
        return [json.loads(line) for line in answer.splitlines()]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(SubmissionServer(tmp_path / "r", succeed, succeed).serve)
        await until(lambda: anyio.Path(socket_path(tmp_path / "r")).exists(), 60)
        [refused] = await send(nested)
        assert "nested" in str(refused["error"])
        path = str(write_model(tmp_path / "start"))
        job = {"dataset": "d", "model": {"path": path, "type": "auto"}, "inner_optimizer": {"learning_rate": 1}}
        accepted, result = await send(json.dumps({"job": job}).encode())
        assert (accepted["accepted"], result["result"]) == (True, "/somewhere/result.json")
        tasks.cancel_scope.cancel()


JSON_VALUES = st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.binary() | JSON_VALUES.map(lambda value: json.dumps({"job": value}).encode()))
def test_what_is_no_job_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_job(data)
