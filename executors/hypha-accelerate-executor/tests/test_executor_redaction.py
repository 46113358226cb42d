"""The token in a job is sent to the bridge and written nowhere."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha.accelerate_executor.bridge.redaction import Redaction

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(120)]

TOKEN = "hf_secretSECRETsecretSECRET0123456789"


def _job(worker: Any, **config: Any) -> str:
    artifact = {"type": "huggingface", "repository": "o/n", "revision": None, "filenames": ["a"], "token": TOKEN}
    model = {"task": "image-classification", "artifact": artifact, "input-names": []}
    return str(worker.job(model=model, **config))


def _run(worker: Any, job: str) -> tuple[int, str]:
    """Run the executor as a worker does; return its exit code and all output, arguments included."""
    path = worker.work_dir / "job.json"
    path.write_text(job)
    command = [sys.executable, "-m", "hypha.accelerate_executor.training", *worker.arguments()[:-1], f"@{path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_TOKEN": TOKEN}
    process = subprocess.Popen(
        command, cwd=worker.work_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    arguments = Path(f"/proc/{process.pid}/cmdline")
    seen = arguments.read_text() if arguments.exists() else ""
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, seen + output


def _written(worker: Any) -> str:
    """Return everything that the executor left in its directory except the job."""
    files = (path for path in worker.work_dir.rglob("*") if path.is_file() and path.name != "job.json")
    return "".join(path.read_bytes().decode(errors="replace") for path in files)


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        ("/resources/fetch", (502, {"error": "fetch-failed", "detail": f"401 for token {TOKEN}"})),
        ("/resources/fetch", (500, f"<html>Authorization: Bearer {TOKEN}")),
        ("/resources/fetch", (200, [{"path": f"../{TOKEN}"}])),
        ("/status/batches", (400, {"error": "bad", "detail": TOKEN})),
    ],
)
def test_an_error_that_quotes_the_token_is_redacted(make_worker: Callable[..., Any], route: str, answer: Any) -> None:
    worker = make_worker()
    worker.answers[route] = lambda _: answer
    code, output = _run(worker, _job(worker))
    assert code == 1
    assert "ERROR" in output
    assert TOKEN not in output
    assert TOKEN not in _written(worker)


def test_a_complete_run_writes_no_token(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=4)
    asked: list[Any] = []
    worker.answers["/resources/fetch"] = lambda body: asked.append(body) or worker.fetch(body)
    code, output = _run(worker, _job(worker))
    assert code == 0
    assert TOKEN in str(asked)  # sent to the bridge, which may not insert tokens itself
    assert TOKEN not in output
    assert TOKEN not in _written(worker)
    assert TOKEN not in str(worker.reports) + str(worker.sent)


@pytest.mark.parametrize("change", [{"batch_size": "many"}, {"optimizer": None}, {"batch_size": 0}])
def test_a_malformed_job_is_reported_without_its_token(make_worker: Callable[..., Any], change: Any) -> None:
    worker = make_worker()
    code, output = _run(worker, _job(worker, **change))
    assert code == 2
    assert TOKEN not in output


def test_a_traceback_is_redacted_too(caplog: pytest.LogCaptureFixture) -> None:
    handler = logging.StreamHandler()
    records: list[str] = []
    handler.emit = lambda record: records.append(handler.format(record))  # type: ignore[method-assign]
    handler.addFilter(Redaction([TOKEN]))
    logger = logging.getLogger("test_executor_secrets")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(TOKEN)
        except ValueError:
            logger.exception("%s and %d", TOKEN, 5)
    finally:
        logger.removeHandler(handler)
    assert len(records) == 1
    assert records[0].startswith("*** and 5\nTraceback")
    assert TOKEN not in records[0]
