"""The numpy executor of the fault tests: it joins, rejoins, and fails as told."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
from support import numpy_executor
from support.numpy_executor import KILL, LEAVE, MEMORY, OUT_OF_MEMORY, STOP, Failure, write_model
from support.waiting import wait_until

from hypha_proto.weights_digest import digest_weights

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
WEIGHTS = {
    "type": "peers",
    "peers": [PEER],
    "strategy": {"type": "One"},
    "resource": {"dataset": "job/weights", "index": 0},
    "filenames": ["weights.safetensors"],
}
DIGEST = f"blake3:{'ab' * 32}"


@pytest.fixture
def worker(make_worker: Callable[..., Any], tmp_path: Path) -> Any:
    write_model(tmp_path / "model", features=64)
    return make_worker(model_dir=tmp_path / "model", rounds=3, batches=4)


def start(worker: Any, *failures: Failure, counts: Path | None = None, **config: Any) -> subprocess.Popen[str]:
    """Start the executor as a process."""
    faults = json.dumps([asdict(failure) for failure in failures])
    environment = dict(os.environ) | {numpy_executor.FAILURES: faults}
    if counts is not None:
        environment[numpy_executor.COUNTS] = str(counts)
    command = [sys.executable, numpy_executor.__file__, *worker.arguments(term=1, weights=WEIGHTS, **config)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def forget(worker: Any) -> None:
    """Let the worker begin again with an executor that is started again."""
    worker.batches_seen, worker.done_rounds, worker.events = 0, 0, queue.Queue()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; return exit code, output and errors."""
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def serve_weights(worker: Any, rounds: list[int]) -> list[str]:
    """Serve weights after these rounds, one a request; return their digests."""
    files = []
    for number in rounds:
        tensors = {"bias": np.full(10, number, "f4"), "weight": np.full((10, 64), number, "f4")}
        files.append((number, tensors))
    coming = iter(files)

    def fetch(body: Any) -> tuple[int, Any]:
        if body.get("filenames") != WEIGHTS["filenames"]:
            return worker.fetch(body)  # type: ignore[no-any-return]
        number, tensors = next(coming)
        path = worker.work_dir / body["out_dir"] / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        safetensors.numpy.save_file(tensors, path, {"round": str(number)})
        return 200, [{"path": f"{body['out_dir']}/{path.name}", "metadata": {}}]

    worker.answers["/resources/fetch"] = fetch
    return [digest_weights(tensors.items()) for _, tensors in files]


def contributions(worker: Any) -> list[Any]:
    return [body["contribution"] for body in worker.sent]


def test_it_begins_with_the_round_and_the_weights_that_it_is_given(worker: Any) -> None:
    [digest] = serve_weights(worker, [4])
    worker.answers["/rounds/join"] = lambda _: (200, {"round": 5, "weights": digest})
    code, output, _ = finish(start(worker, join=True))
    assert code == 0, output
    assert [each["round"] for each in contributions(worker)] == [5, 6, 7]
    assert contributions(worker)[0]["weights"] == digest


def test_it_joins_again_when_the_job_has_gone_on(worker: Any) -> None:
    digests = serve_weights(worker, [6, 6])
    answers = [{"round": 5, "weights": DIGEST}, {"round": 7, "weights": digests[0]}]
    worker.answers["/rounds/join"] = lambda _: (200, answers.pop(0))
    assert finish(start(worker, join=True))[0] == 0
    assert [each["round"] for each in contributions(worker)] == [7, 8, 9]


def test_it_does_not_train_from_weights_with_another_digest(worker: Any) -> None:
    serve_weights(worker, [4])
    worker.answers["/rounds/join"] = lambda _: (200, {"round": 5, "weights": DIGEST})
    code, _, errors = finish(start(worker, join=True))
    assert (code, worker.sent) == (1, [])
    assert f"expected {DIGEST}" in errors


def test_it_begins_as_the_task_says_where_nobody_names_a_round(worker: Any) -> None:
    serve_weights(worker, [1])
    assert finish(start(worker, first_round=2))[0] == 0
    assert [each["round"] for each in contributions(worker)] == [2, 3, 4]


def test_it_leaves_a_closed_round_and_begins_anew(worker: Any) -> None:
    [digest] = serve_weights(worker, [3])
    rounds = [{"round": 1}, {"round": 4, "weights": digest}]
    worker.answers["/rounds/join"] = lambda _: (200, rounds.pop(0))
    sent = []

    def send(body: Any) -> tuple[int, Any]:
        sent.append(body["round"])
        if body["round"] == 2:
            worker.batches_seen = 0
            return 409, {"error": "round-closed", "detail": "round 2 goes on without it"}
        return worker.send(body)  # type: ignore[no-any-return]

    worker.answers["/resources/send"] = send
    worker.rounds = 3
    code, output, errors = finish(start(worker, join=True))
    assert code == 0, errors
    assert sent == [1, 2, 4, 5]
    assert "round 2: closed: round 2 goes on without it" in output
    assert not list(worker.work_dir.glob("update-2*"))
    again = contributions(worker)[1]["ranges"][0]
    assert (again["first"], again["slice"]) == (0, 2)  # the slice that was begun before has been given up


def test_it_dies_at_a_batch_as_often_as_told(worker: Any, tmp_path: Path) -> None:
    worker.answers["/rounds/join"] = lambda _: (200, {"round": 1})
    death, counts = Failure(round=1, how=KILL, batch=2, times=2), tmp_path / "counts"
    for _ in range(2):
        forget(worker)
        assert finish(start(worker, death, counts=counts, join=True))[0] == -signal.SIGKILL
        assert worker.batches_seen == 1
    forget(worker)
    assert finish(start(worker, death, counts=counts, join=True))[0] == 0
    assert counts.read_text().split() == ["0", "0"]


def test_it_runs_out_of_memory_until_the_micro_batch_is_small(worker: Any) -> None:
    limit = Failure(round=2, how=MEMORY, batch=1, above=8)
    code, _, errors = finish(start(worker, limit))
    assert (code, errors.splitlines()) == (OUT_OF_MEMORY, ["out of memory: as told"])
    forget(worker)
    assert finish(start(worker, limit, micro_batch=8))[0] == 0
    last = [report["metrics"] for report in worker.reports if isinstance(report, dict) and "metrics" in report][-1]
    assert last["metrics"]["micro_batch"] == 8.0


def test_it_exits_with_a_code_and_a_message(worker: Any) -> None:
    code, _, errors = finish(start(worker, Failure(round=0, how=LEAVE, code=2, message="no such model")))
    assert (code, errors.splitlines()[-1]) == (2, "no such model")
    assert worker.reports == []


def test_it_stops_itself_before_it_sends_and_goes_on(worker: Any) -> None:
    process = start(worker, Failure(round=2, how=STOP))
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 60, "the executor stops")
    assert len(worker.sent) == 1
    process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 0
    assert len(worker.sent) == 3
