"""Retry queue and runs: no metric is lost while AIM fails, each goes to its job's run, the queue is bounded."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from hypha_aim_driver import repository
from hypha_aim_driver.app import AimMetrics, create_app
from hypha_aim_driver.cli import main
from hypha_aim_driver.retry_queue import NotWrittenError, RetryQueue
from hypha_aim_driver.runs import JobRuns

A = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
B = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def metric(number: int, worker: str = A, job: str | None = "j", value: float = 0.5) -> AimMetrics:
    return AimMetrics(worker_id=worker, round=number, metric_name="loss", value=value, job_id=job)


class StubRun:
    def __init__(self, job: str | None, fails: Iterator[bool]) -> None:
        self.job, self.fails = job, fails
        self.values: dict[tuple[str, str, int], float] = {}
        self.closed = 0

    def track(self, value: float, *, name: str, step: int, worker: str) -> None:
        if next(self.fails):
            raise NotWrittenError("disk full")
        self.values[worker, name, step] = value

    def confirm(self) -> None:
        if next(self.fails):
            raise NotWrittenError("server gone")

    def close(self) -> None:
        self.closed += 1


class StubRepository:
    def __init__(self, fails: Sequence[bool] = ()) -> None:
        self.opened: list[StubRun] = []
        self._fails = iter([*fails, *[False] * 10_000])

    def open(self, job_id: str | None) -> StubRun:
        for run in self.opened:
            if job_id is not None and run.job == job_id:
                return run
        self.opened.append(StubRun(job_id, self._fails))
        return self.opened[-1]


class ListWriter:
    def __init__(self) -> None:
        self.down = True
        self.written: list[AimMetrics] = []
        self.attempts = 0

    def write(self, metrics: Sequence[AimMetrics]) -> int:
        self.attempts += 1
        if self.down:
            raise NotWrittenError("connection refused")
        self.written += metrics[:3]
        return len(metrics[:3])

    def on_idle(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def running_queue(writer: Any, **options: Any) -> Iterator[RetryQueue]:
    queue = RetryQueue(writer, **options)
    try:
        yield queue
    finally:
        queue.close(30)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_metrics_are_queued_while_aim_fails_and_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writer = ListWriter()
    posts = [metric(number) for number in range(20)]
    with running_queue(writer, retry=0.01) as queue:
        for post in posts:
            queue.record(post)
        wait_for(lambda: writer.attempts >= 3)
        assert queue.waiting == 20
        writer.down = False
        wait_for(lambda: queue.waiting == 0)
    assert writer.written == posts
    assert [r.getMessage().partition(":")[0] for r in caplog.records if r.levelname == "WARNING"] == [
        "AIM does not accept metrics; they are kept and retried"
    ]
    assert any("accepts metrics again" in r.getMessage() for r in caplog.records)


def test_full_queue_refuses_with_503_and_keeps_its_metrics(caplog: pytest.LogCaptureFixture) -> None:
    writer = ListWriter()
    with running_queue(writer, capacity=2, retry=0.01) as queue:
        client = TestClient(create_app(queue))
        answers = [client.post("/status", json=metric(number).model_dump()) for number in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 503, 503]
        assert client.post("/status", json=metric(1).model_dump() | {"round": "x"}).status_code == 422
        writer.down = False
        wait_for(lambda: queue.waiting == 0)
        assert client.post("/status", json=metric(9).model_dump()).status_code == 200
    assert [post.round for post in writer.written] == [0, 1, 9]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1


def test_hanging_aim_blocks_neither_requests_nor_exit(caplog: pytest.LogCaptureFixture) -> None:
    begun, released = threading.Event(), threading.Event()

    class Hanging(ListWriter):
        def write(self, metrics: Sequence[AimMetrics]) -> int:
            begun.set()
            released.wait(60)
            return len(metrics)

    queue = RetryQueue(Hanging(), stall_timeout=0.0)
    try:
        queue.record(metric(1))
        begun.wait()
        queue.record(metric(2))
        assert queue.close(0.1) == 2
        assert queue.is_running
    finally:
        released.set()
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_one_run_per_job_and_one_series_per_worker() -> None:
    repository = StubRepository()
    runs = JobRuns(repository)
    posts = [metric(1), metric(1, B, value=2.0), metric(1, job="k"), metric(2)]
    assert runs.write(posts) == 4
    assert {run.job: run.values for run in repository.opened} == {
        "j": {(A, "loss", 1): 0.5, (B, "loss", 1): 2.0, (A, "loss", 2): 0.5},
        "k": {(A, "loss", 1): 0.5},
    }
    runs.close()
    assert [run.closed for run in repository.opened] == [1, 1]


def test_idle_run_is_closed_and_reopened() -> None:
    now = 0.0
    repository = StubRepository()
    runs = JobRuns(repository, clock=lambda: now)
    runs.write([metric(1)])
    now = 599.0
    runs.on_idle()
    assert repository.opened[0].closed == 0
    now = 601.0
    runs.on_idle()
    assert repository.opened[0].closed == 1
    runs.write([metric(2)])
    assert len(repository.opened) == 1


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 4)), min_size=1, max_size=20),
    st.lists(st.booleans(), max_size=30),
)
def test_jobs_without_id_are_separated_by_rounds_despite_failures(
    jobs: list[tuple[str, int]], fails: list[bool]
) -> None:
    """Jobs of one worker with several rounds: each gets one complete run, also when writes are repeated."""
    posts = [metric(number, worker, None) for worker, rounds in jobs for number in range(1, rounds + 1)]

    def runs_of(repository: StubRepository) -> list[Counter[tuple[str, int]]]:
        writer, left = JobRuns(repository), list(posts)
        while left:
            try:
                left = left[writer.write(left) :]
            except NotWrittenError:
                continue
        return [Counter((worker, step) for worker, _, step in run.values) for run in repository.opened]

    whole = runs_of(StubRepository())
    assert runs_of(StubRepository(fails)) == whole
    for run in whole:
        for worker in {worker for worker, _ in run}:
            steps = sorted(step for name, step in run if name == worker)
            assert steps == list(range(1, len(steps) + 1))


def test_repo_without_aim_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "aim_is_installed", lambda: False)
    answer = CliRunner().invoke(main, ["--repo", "runs"])
    assert answer.exit_code == 2
    assert "hypha-aim-driver[aim]" in answer.output


def test_web_address_as_repo_is_a_usage_error() -> None:
    answer = CliRunner().invoke(main, ["--repo", "http://aim:53800"])
    assert answer.exit_code == 2
    assert "aim://HOST:PORT" in answer.output


def test_errors_of_aim_become_not_written_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_location: str) -> None:
        raise RuntimeError("Failed to connect to Aim Server")

    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Repo=fail))  # type: ignore[arg-type]
    with pytest.raises(NotWrittenError, match=r"aim://h:1: RuntimeError: Failed to connect"):
        repository.AimRepository("aim://h:1").open("j")
