"""A job directory with a journal is continued: what a strategy gets, and which jobs cannot be resumed."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.scripted_jobs import OpenJobs, QuietOperator, ScriptedJob, ScriptedStrategy

from hypha_proto.record_file import EVENTS
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, Journal, read_journal
from hypha_scheduler.strategies.base import EndJob, JobContext, WriteJournal

pytestmark = pytest.mark.virtual_clock

JOB = uuid.UUID(int=7)


def interrupted(runs: Path, job_id: uuid.UUID = JOB, *, kind: str = "scripted") -> Path:
    """Write the files of a job whose scheduler was killed while it wrote; return their directory."""
    directory = runs / str(job_id)
    directory.mkdir(parents=True)
    with Journal(directory / JOURNAL) as journal:
        journal.record("accepted", job_id=str(job_id), job={"type": kind})
        journal.append("done", number=1)
    for name in (JOURNAL, EVENTS):
        with (directory / name).open("a") as file:
            file.write('{"record": "cut sho')
    return directory


async def test_an_interrupted_job_goes_on_with_its_journal(open_jobs: OpenJobs, tmp_path: Path) -> None:
    async with open_jobs() as lab:
        directory = interrupted(tmp_path / "runs")
        operator: QuietOperator = await lab.start(job_id=JOB, resume=True)
        assert operator.context.directory == directory
        assert [(record["record"], record.get("number")) for record in lab.strategy.journals[0]] == [
            ("accepted", None),
            ("done", 1),
        ]
        operator.act(WriteJournal("done", {"number": 2}))
        await operator.until("acquired")
        await lab.finish(operator)
        assert lab.results == [directory / "result.json"]
        records = [record["record"] for record in read_journal(directory / JOURNAL)]
        assert records == ["accepted", "done", "resumed", "done", "placed", "finished"]
        lines = [json.loads(line) for line in (directory / EVENTS).read_text().splitlines()]
        assert [line["event"] for line in lines] == ["resumed", "placement", "finished"]
        await lab.run(job_id=JOB, resume=True)
        assert "the job cannot be resumed: it has finished" in str(lab.results[-1])


async def test_a_resumed_job_may_do_without_the_files_that_it_began_with(
    open_jobs: OpenJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its strategy has copies in the job's directory, or says what it lacks."""
    strategy = ScriptedStrategy()
    monkeypatch.setattr(ScriptedJob, "missing_files", lambda _job: ["model.path: there is no directory gone"])
    async with open_jobs(strategy) as lab:
        await lab.run()
        assert "model.path: there is no directory gone" in str(lab.results[-1])
        interrupted(tmp_path / "runs")
        operator: QuietOperator = await lab.start(job_id=JOB, resume=True)
        await lab.finish(operator)
        assert lab.results[-1] == tmp_path / "runs" / str(JOB) / "result.json"


async def test_a_job_can_be_interrupted_again(open_jobs: OpenJobs, tmp_path: Path) -> None:
    """The second scheduler is killed, too; the third gets the records of both."""
    async with open_jobs() as lab:
        directory = interrupted(tmp_path / "runs")
        with Journal(directory / JOURNAL) as journal:
            journal.record("resumed")
            journal.append("done", number=2)
        operator = await lab.start(job_id=JOB, resume=True)
        assert [record["number"] for record in lab.strategy.journals[0] if record["record"] == "done"] == [1, 2]
        await lab.finish(operator)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ("missing", "there is no job to resume: it has no journal.jsonl"),
        ("type", "the job is of type 'other', not 'scripted'"),
        ("locked", "another scheduler runs this job"),
    ],
)
async def test_what_cannot_be_resumed_stays_as_it_is(open_jobs: OpenJobs, tmp_path: Path, spoil: str, why: str) -> None:
    async with open_jobs() as lab:
        directory = tmp_path / "runs" / str(JOB)
        if spoil != "missing":
            interrupted(tmp_path / "runs", kind="other" if spoil == "type" else "scripted")
        before = read_journal(directory / JOURNAL)
        with Journal(tmp_path / "other" if spoil != "locked" else directory / JOURNAL) as other:
            other.lock()
            await lab.run(job_id=JOB, resume=True)
        [error] = lab.results
        assert isinstance(error, JobFailedError)
        assert why in str(error)
        assert lab.strategy.operators == []
        assert read_journal(directory / JOURNAL) == before
        assert not lab.strategy.journals
        assert directory.exists() == (spoil != "missing")


async def test_a_job_that_cannot_begin_or_has_failed_is_resumed_later(open_jobs: OpenJobs, tmp_path: Path) -> None:
    """A dataset may be missing for now: the job has not failed by that, and its files are as before."""

    class Unready(ScriptedStrategy):
        def open(self, job: Any, context: JobContext, journal: Any) -> Any:
            if not self.journals:
                self.journals.append(journal)
                raise JobFailedError("no data node announces it")
            return super().open(job, context, journal)

    strategy = Unready()
    async with open_jobs(strategy) as lab:
        directory = interrupted(tmp_path / "runs")
        before = read_journal(directory / JOURNAL)
        await lab.run(job_id=JOB, resume=True)
        assert str(lab.results[0]) == "no data node announces it"
        assert read_journal(directory / JOURNAL) == before
        operator = await lab.start(job_id=JOB, resume=True)
        operator.act(EndJob(failure="it is over"))
        await lab.ended(2)
        assert [record["record"] for record in read_journal(directory / JOURNAL)][-1] == "failed"
        operator = await lab.start(job_id=JOB, resume=True)
        await lab.finish(operator)
        kinds = [record["record"] for record in read_journal(directory / JOURNAL)]
        assert kinds == ["accepted", "done", "resumed", "failed", "resumed", "finished"]


async def test_a_running_job_is_not_started_again(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator = await lab.start(ScriptedJob(), JOB)
        await lab.run(job_id=JOB, resume=True)
        assert str(lab.results[0]) == f"job {JOB} runs already"
        await lab.finish(operator)
        assert isinstance(lab.results[1], Path)
