"""The commands `resume` and `audit`: which jobs go on, by whom they are run, and what proves their results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner, Result
from support.inference_simulation import FakeContext, FakeDataset, Simulation, in_place, job_table

from hypha_proto.record_file import EVENTS
from hypha_scheduler.audit import NoAuditError, audit
from hypha_scheduler.cli import main
from hypha_scheduler.errors import JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.jobs.journal import JOURNAL, Journal
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.registry import parse_job
from hypha_scheduler.submission.client import connect, resume_job, socket_path
from hypha_scheduler.submission.resumption import find_resumable, revealed
from hypha_scheduler.submission.server import SubmissionServer

JOB_ID = uuid.UUID(int=5)
ROWS = (3, 2, 4)
PLAIN: dict[str, Any] = {
    "type": "inference",
    "dataset": "questions",
    "model": {"repository": "owner/name", "type": "causal-lm"},
    "inference": {"task": "generate", "prompt": "Q: {question}"},
    "resources": {"num_workers": 3},
}


def table(**changes: Any) -> InferenceJobConfig:
    return InferenceJobConfig.model_validate(PLAIN | changes)


def with_token(token: str = "hf_secret", **changes: Any) -> InferenceJobConfig:
    return table(model={**PLAIN["model"], "token": token}, **changes)


def interrupted(runs: Path, job: JobTable | dict[str, Any], *records: str) -> Path:
    """Write the directory of a job whose scheduler was killed."""
    directory = runs / str(JOB_ID)
    directory.mkdir(parents=True)
    plain = job if isinstance(job, dict) else job.model_dump(mode="json")
    with Journal(directory / JOURNAL) as journal:
        journal.record("accepted", job_id=str(JOB_ID), job=plain)
        for kind in records:
            journal.record(kind)
    return directory


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------------------- which jobs


@pytest.mark.parametrize("records", [(), ("failed",), ("failed", "resumed")])
def test_an_interrupted_or_failed_job_is_the_one_in_its_journal(tmp_path: Path, records: tuple[str, ...]) -> None:
    directory = interrupted(tmp_path, table(), *records)
    found = find_resumable(directory, tmp_path, [])
    assert (found.job_id, found.directory, found.job) == (JOB_ID, directory, table())


DILOCO = {
    "dataset": "digits",
    "model": {"path": "model", "type": "vision-classification"},
    "inner_optimizer": {"learning_rate": 1e-3},
}
CLASSIFY = PLAIN | {"model": {"path": "m", "type": "vision-classification"}, "inference": {"task": "classify"}}


TASKS: dict[str, Any] = {
    "type": "tasks",
    "tasks": [
        {
            "name": "a",
            "driver": {"shell/x": {"k": [1, {"b": None}]}},
            "resources": [
                {"name": "m", "huggingface": {"repository": "o/n", "filenames": ["x"], "token": "hf_secret"}},
                {"name": "d", "dataset": "numbers"},
            ],
            "outputs": {"o": "o"},
            "needs": {"cpu": 1},
        }
    ],
}


def test_a_missing_secret_in_a_list_is_named_with_its_place(tmp_path: Path) -> None:
    job = parse_job(TASKS)
    directory = interrupted(tmp_path, job)
    assert "tasks[0].resources[0].huggingface.token: the journal keeps no secrets" in refused(directory, tmp_path, [])
    assert find_resumable(directory, tmp_path, [job]).job == job
    assert parse_job(json.loads(json.dumps(revealed(job)))) == job


@pytest.mark.parametrize("plain", [PLAIN, CLASSIFY, DILOCO])
def test_what_a_journal_has_accepted_is_a_valid_job(plain: dict[str, Any]) -> None:
    job = parse_job(plain)
    assert parse_job(json.loads(json.dumps(job.model_dump(mode="json")))) == job


def test_secrets_and_resources_come_from_the_same_job_in_the_configuration(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, with_token())
    assert "hf_secret" not in (directory / JOURNAL).read_text()
    configured = with_token(resources={"num_workers": 1})
    other = parse_job(DILOCO)
    found = find_resumable(directory, tmp_path, [other, configured])
    assert found.job == configured
    assert revealed(found.job)["model"]["token"] == "hf_secret"
    assert parse_job(json.loads(json.dumps(revealed(found.job)))) == configured


def refused(directory: Path, runs: Path, configured: list[JobTable]) -> str:
    """Return why a job is refused, after which its files are as before."""
    before = contents(runs)
    with pytest.raises(JobRefusedError) as caught:
        find_resumable(directory, runs, configured)
    assert contents(runs) == before
    return str(caught.value)


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, with_token())
    why = refused(directory, tmp_path, [])
    assert "model.token: the journal keeps no secrets; put the job with them into [scheduler.job]" in why
    assert refused(directory, tmp_path, [parse_job(DILOCO)]) == why


def test_another_job_in_the_configuration_is_refused_with_every_difference(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, table())
    other = table(
        model={"repository": "owner/other", "type": "causal-lm"},
        inference={"task": "generate", "prompt": "A: {question}", "temperature": 0.5},
        dataset="answers",
    )
    lines = refused(directory, tmp_path, [other]).splitlines()
    assert "the configuration has another job; name a configuration with the job as it was, or without one" in lines[0]
    assert lines[1:] == [
        "dataset.dataset is 'answers', and was 'questions'",
        "model.repository is 'owner/other', and was 'owner/name'",
        "inference.prompt is 'A: {question}', and was 'Q: {question}'",
        "inference.temperature is 0.5, and was 0.0",
    ]


def test_a_job_without_the_secret_that_it_had_is_another(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, with_token())
    assert "model.token is unset, and was '**********'" in refused(directory, tmp_path, [table()])


def add(kind: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        with Journal(directory / JOURNAL) as journal:
            journal.record(kind)

    return spoil


def write(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / JOURNAL).write_text(text) and None


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no journal": (lambda directory: (directory / JOURNAL).unlink(), "there is no job to resume: it has no journal"),
    "empty": (write(""), "there is no job to resume: journal.jsonl has no record"),
    "finished": (add("finished"), "the job cannot be resumed: it has finished"),
    "result": (lambda directory: (directory / "result.json").touch(), "it has finished, result.json is there"),
    "version": (write('{"record": "accepted", "format": 9}\n'), "the journal is of format 9, this version reads 2"),
    "malformed": (write('{"record": "accepted", "format": 2}\nx\n'), "line 2 of the journal is malformed"),
    "no job": (write('{"record": "accepted", "format": 2, "job_id": "x"}\n'), "has no job"),
    "no id": (write('{"record": "accepted", "format": 2, "job": {"type": "inference"}}\n'), "names no job_id"),
    "unknown key": (
        write(f'{{"record": "accepted", "format": 2, "job_id": "{JOB_ID}", "job": {{"type": "inference", "x": 1}}}}\n'),
        "this version does not know the job in its journal: dataset: Field required",
    ),
    "unknown type": (
        write(f'{{"record": "accepted", "format": 2, "job_id": "{JOB_ID}", "job": {{"type": "sweep"}}}}\n'),
        "no strategy 'sweep' is installed",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_resumed_is_named_and_left_alone(tmp_path: Path, case: str) -> None:
    spoil, why = BAD[case]
    directory = interrupted(tmp_path, table())
    spoil(directory)
    assert why in refused(directory, tmp_path, [])


def test_a_running_job_is_refused(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, table())
    with Journal(directory / JOURNAL) as journal:
        assert journal.lock()
        assert "another scheduler runs this job; stop it first" in refused(directory, tmp_path, [])


def test_a_directory_of_another_scheduler_or_name_is_refused(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "runs", table())
    assert "it is not in" in refused(directory, tmp_path, [])
    moved = directory.rename(directory.with_name("copy"))
    assert f"its journal is of job {JOB_ID}; give the directory that name again" in refused(
        moved, tmp_path / "runs", []
    )


# -------------------------------------------------------------------------------------------------------- who runs them


class Server:
    """Submission server of a scheduler that notes which jobs it is to run."""

    def __init__(self, runs: Path) -> None:
        self.resumed: list[tuple[JobTable, uuid.UUID]] = []
        self.runs = runs

    async def run(self, _job: JobTable, _job_id: uuid.UUID) -> Path:
        raise AssertionError("it is not a new job")

    async def resume(self, job: JobTable, job_id: uuid.UUID) -> Path:
        self.resumed.append((job, job_id))
        with EventFile(self.runs / str(job_id) / EVENTS) as file:
            file.write("paused", reason="the disk is full")
        return Path("/somewhere/result.json")

    def during(self, act: Callable[[], Any]) -> Any:
        """Return what a function in a thread returns while the server accepts jobs."""

        async def case() -> Any:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(SubmissionServer(self.runs, self.run, self.resume).serve)
                while not await anyio.Path(socket_path(self.runs)).exists():
                    await anyio.sleep(0.01)
                found = await anyio.to_thread.run_sync(act)
                tasks.cancel_scope.cancel()
            return found

        return anyio.run(case, backend="trio")


def configuration(folder: Path, job: str = "") -> Path:
    file = folder / "scheduler.toml"
    file.write_text(
        'cert_pem = "c"\nkey_pem = "k"\ntrust_pem = "t"\ngateway_addresses = ["/ip4/127.0.0.1/tcp/1"]\n'
        f'output_dir = "{folder / "runs"}"\n{job}'
    )
    return file


def resume(directory: Path, config: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["resume", str(directory), "--config", str(config), *more])


JOB_WITH_SECRET = """
[scheduler.job]
type = "inference"
dataset = "questions"
model = { repository = "owner/name", type = "causal-lm", token = "hf_secret" }
inference = { task = "generate", prompt = "Q: {question}" }
resources = { num_workers = 2 }
"""


def test_the_running_scheduler_resumes_a_job(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "runs", with_token())
    with EventFile(directory / EVENTS) as events:
        events.write("paused", reason="before it was interrupted")
    file = configuration(tmp_path, JOB_WITH_SECRET)
    server = Server(tmp_path / "runs")
    done = server.during(lambda: resume(directory, file))
    assert done.exit_code == 0, done.output
    first, event, last = done.output.splitlines()
    assert event == "paused: the disk is full"
    accepted, result = json.loads(first), json.loads(last)
    assert accepted == {"accepted": True, "job_id": str(JOB_ID), "directory": str(directory)}
    assert result == {"result": "/somewhere/result.json"}
    [(job, job_id)] = server.resumed
    assert (job, job_id) == (with_token(resources={"num_workers": 2}), JOB_ID)


def test_the_running_scheduler_refuses_before_it_accepts(tmp_path: Path) -> None:
    """What the command finds out by itself it does not even ask."""
    directory = interrupted(tmp_path / "runs", table())
    server = Server(tmp_path / "runs")
    other = revealed(table(dataset="answers"))
    answers = server.during(lambda: list(resume_job(socket_path(tmp_path / "runs"), directory, other, detach=False)))
    assert len(answers) == 1
    assert "dataset.dataset is 'answers', and was 'questions'" in answers[0].answer["error"]

    def ask_for_no_directory() -> bytes:
        with connect(socket_path(tmp_path / "runs"), {"resume": 3}) as connection:
            return connection.recv(1 << 16)

    assert b"resume: expected the path of a job's directory" in server.during(ask_for_no_directory)
    assert server.resumed == []


def test_without_a_scheduler_the_command_runs_the_job_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = interrupted(tmp_path / "runs", with_token())
    ran: list[tuple[JobTable, uuid.UUID]] = []

    def run_daemon(_config: Any, serve: Any, **_: Any) -> int:
        ran.append((serve.keywords["found"].job, serve.keywords["found"].job_id))
        return 0

    monkeypatch.setattr("hypha_net.node.lifecycle.run_daemon", run_daemon)
    done = resume(directory, configuration(tmp_path, JOB_WITH_SECRET))
    assert done.exit_code == 0, done.output
    assert ran == [(with_token(resources={"num_workers": 2}), JOB_ID)]


def test_a_refused_job_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_net.node.lifecycle.run_daemon", lambda *_: SimpleNamespace())
    directory = interrupted(tmp_path / "runs", with_token())
    before = contents(tmp_path / "runs")
    done = resume(directory, configuration(tmp_path))
    assert done.exit_code == 2
    assert "model.token: the journal keeps no secrets" in done.output
    assert contents(tmp_path / "runs") == before


# ---------------------------------------------------------------------------------------------------------------- audit


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a job that has computed `ROWS`."""
    monkeypatch.setattr(anyio.to_thread, "run_sync", in_place)
    directory = tmp_path / "job"
    directory.mkdir()
    run = Simulation(FakeContext(directory, FakeDataset(ROWS)), job_table())
    run.settle()
    run.close()
    assert audit(directory).faults == []
    return directory


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))

    return spoil


def repeat_last(name: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / name
        path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")

    return spoil


def drop_record(directory: Path) -> None:
    path = directory / JOURNAL
    lines = [line for line in path.read_text().splitlines() if '"slice": 1' not in line]
    path.write_text("\n".join(lines) + "\n")


def repeat_record(directory: Path) -> None:
    path = directory / JOURNAL
    [line] = [line for line in path.read_text().splitlines() if '"slice": 1,' in line]
    with path.open("a") as file:
        file.write(line + "\n")


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part is missing": (lambda folder: (folder / "results/part-1.jsonl").unlink(), "slice 1: its part is missing"),
    "a row is twice": (repeat_last("results/part-2.jsonl"), "row 3 has a second result"),
    "a row has another number": (edit("results/part-0.jsonl", '"row": 1', '"row": 9'), "rows 1 have no result"),
    "a row of another slice": (edit("results/part-0.jsonl", '"slice": 0', '"slice": 1'), "in the part of slice 0"),
    "a row that is no JSON": (edit("results/part-0.jsonl", "{", ""), "line 1 is no result"),
    "another text": (edit("results/part-0.jsonl", "0/0", "0/1"), "part-0.jsonl: the digest is blake3:"),
    "an unknown file": (lambda folder: (folder / "results/part-3.jsonl").touch(), "the journal does not know this"),
    "no record of a part": (drop_record, "slice 1: its 2 rows have no result; resume the job"),
    "two records of a part": (repeat_record, "slice 1: the journal has two parts of it"),
    "another manifest": (edit("manifest.json", '"samples":3', '"samples":4'), "manifest.json: the digest is blake3:"),
    "other results": (edit("results/manifest.json", '"samples":3', '"samples":4'), "rows and digest of part-0.jsonl"),
    "malformed results": (edit("results/manifest.json", '"slices"', '"parts"'), "it is malformed: KeyError('slices')"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_the_audit_names_what_is_wrong(finished: Path, case: str) -> None:
    spoil, why = FAULTS[case]
    spoil(finished)
    assert why in "\n".join(audit(finished).faults)
    done = CliRunner().invoke(main, ["audit", str(finished)])
    assert done.exit_code == 1
    assert why in done.output


def test_the_audit_says_what_it_has_proven(finished: Path) -> None:
    done = CliRunner().invoke(main, ["audit", str(finished)])
    assert done.exit_code == 0
    assert done.output == "9 of 9 rows of 3 slices have exactly one result, 0 of them an error; complete\n"


def test_what_a_data_node_writes_beside_the_results_is_no_fault(finished: Path) -> None:
    (finished / "results" / ".hypha-digests.json").write_text("{}")
    assert audit(finished).faults == []


def test_only_jobs_with_an_audit_can_be_audited(tmp_path: Path) -> None:
    directory = interrupted(tmp_path, parse_job(TASKS))
    with pytest.raises(NoAuditError, match='the job is of type \'tasks\'; only those of type "diloco" and "inference"'):
        audit(directory)
    done = CliRunner().invoke(main, ["audit", str(tmp_path)])
    assert done.exit_code == 2
    assert "there is no journal.jsonl with a record; name a job's directory" in done.output
