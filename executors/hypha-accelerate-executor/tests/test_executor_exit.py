"""Exit of the process: code 0 when done, otherwise one line with the reason and never a traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypha.accelerate_executor import training
from hypha.accelerate_executor.bridge.client import Bridge, Fetched
from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.environment import DELAY_VARIABLE
from hypha.accelerate_executor.errors import BridgeClosed, BridgeRefused, ExecutorError
from hypha_proto.job_spec import UriReference

pytestmark = pytest.mark.timeout(120)

LOSS = "hypha.accelerate_executor.train.trainer.loss_of"
MODEL = {"task": "image-classification", "artifact": {"type": "uri", "value": "x"}, "input-names": []}


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_worker_that_does_not_answer_times_out(make_worker: Callable[..., Any], fails: Callable[..., str]) -> None:
    worker = make_worker()
    enough = threading.Event()

    def never(_: Any) -> tuple[int, Any]:
        enough.wait(30)
        return 0, None

    worker.answers["/status/batches"] = never
    message = fails(training.main, [*worker.arguments(), "--timeout", "2"], 1)
    enough.set()
    assert message == "/status/batches: the worker did not answer within 2 s"


def test_an_outer_update_that_never_arrives_times_out(
    make_worker: Callable[..., Any], fails: Callable[..., str]
) -> None:
    worker = make_worker(batches=3, silent=True)
    message = fails(training.main, [*worker.arguments(), "--timeout", "2"], 1)
    assert message == "no outer update of round 1 came within 2 s"


def test_a_stream_that_ends_early_fails(make_worker: Callable[..., Any], fails: Callable[..., str]) -> None:
    worker = make_worker(batches=3, silent=True)
    worker.events.put(None)
    assert "closed the stream" in fails(training.main, worker.arguments(), 1)


def test_a_missing_socket_fails(tmp_path: Path, make_worker: Callable[..., Any], fails: Callable[..., str]) -> None:
    arguments = make_worker().arguments()
    arguments[1] = str(tmp_path / "nothing.sock")
    assert "closed the bridge" in fails(training.main, arguments, 1)


@pytest.mark.parametrize(
    ("route", "status", "answer", "words"),
    [
        ("/resources/fetch", 403, {"error": "not-allowed", "detail": "no host"}, "403 not-allowed: no host"),
        ("/resources/fetch", 502, "gateway", "502 error"),
        ("/resources/fetch", 200, [{"path": "../../etc/passwd"}], "no path inside the work directory"),
        ("/resources/fetch", 200, [{"path": "/etc/passwd"}], "no path inside the work directory"),
        ("/resources/fetch", 200, [7], "no path inside the work directory"),
        ("/resources/fetch", 200, {"path": "model"}, "malformed-answer: not a list of files"),
        ("/resources/fetch", 200, [], "no config.json"),
        ("/resources/send", 500, {"error": "push-failed", "detail": "peer is away"}, "push-failed: peer is away"),
        ("/resources/receive", 400, {"error": "bad", "detail": "not a sender"}, "400 bad: not a sender"),
        ("/status/send", 200, {"type": "Error"}, "its log says why"),
        ("/status/send", 200, {"type": "Error", "reason": "the round is over"}, "): the round is over"),
        ("/status/send", 200, {"type": "Perhaps"}, "malformed-answer"),
        ("/status/send", 200, b"[" * 100_000, "malformed-answer"),
        ("/status/batches", 0, None, "the worker closed the bridge"),
        ("/status/batches", 404, {"detail": "Not Found"}, "404 error"),
        ("/status/batches", 200, {"counted": 1, "reason": "who are you"}, "of round 1: who are you"),
        ("/status/batches", 200, b"[" * 100_000, "malformed-answer"),
        ("/resources/fetch", 200, b"[" * 100_000, "malformed-answer"),
        ("/resources/fetch", 502, b"[" * 100_000, "502 error"),
    ],
)
def test_a_worker_with_error_or_malformed_answers(
    make_worker: Callable[..., Any], fails: Callable[..., str], route: str, status: int, answer: Any, words: str
) -> None:
    worker = make_worker(batches=3)
    worker.answers[route] = lambda _: (status, answer)
    assert words in fails(training.main, worker.arguments(), 1)


@pytest.mark.parametrize(
    "event", [b"[" * 100_000, b'{"path":' * 900, b"{", b"7", b'{"path": "../../x"}', b'{"path": "x"}', b"[]"]
)
def test_a_malformed_event_ends_the_wait_for_an_outer_update(make_worker: Callable[..., Any], event: bytes) -> None:
    worker = make_worker()
    worker.events.put(event)
    with (
        Bridge(worker.socket, worker.work_dir, 10.0) as bridge,
        pytest.raises(BridgeRefused, match="malformed-answer"),
    ):
        bridge.updates(UriReference(value="https://x.invalid"), "updates").wait(0, 10.0)


def test_an_event_ends_at_a_line_feed_alone(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    name = "incoming/a\u2028b\u0085c"
    (worker.work_dir / "incoming").mkdir()
    (worker.work_dir / name).touch()
    event = {"path": name, "size": 0, "from_peer": "x", "round": 3}
    worker.events.put(json.dumps(event, ensure_ascii=False).replace(", ", ",\r").encode())
    with Bridge(worker.socket, worker.work_dir, 10.0) as bridge:
        found = bridge.updates(UriReference(value="https://x.invalid"), "updates").wait(3, 10.0)
    assert found.path == worker.work_dir / name


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def asking(make_worker: Callable[..., Any]) -> Iterator[tuple[Bridge, dict[str, Any]]]:
    """Return a client and the answers of its worker by route."""
    worker = make_worker()
    with Bridge(worker.socket, worker.work_dir, 10.0) as bridge:
        yield bridge, worker.answers


@given(
    st.sampled_from([200, 502]),
    st.binary()
    | (_JSON | st.dictionaries(st.sampled_from(["path", "error", "metadata"]), _JSON)).map(
        lambda answer: json.dumps(answer).encode()
    ),
)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer_to_a_fetch_is_read_or_an_error(
    asking: tuple[Bridge, dict[str, Any]], status: int, answer: bytes
) -> None:
    bridge, answers = asking
    answers["/resources/fetch"] = lambda _: (status, answer)
    with contextlib.suppress(ExecutorError):
        assert all(isinstance(file, Fetched) for file in bridge.fetch(UriReference(value="https://x.invalid"), "."))


def test_a_busy_worker_is_asked_again(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=1, batches=3)
    refusals = iter([503, 503])

    def fetch(body: Any) -> tuple[int, Any]:
        status = next(refusals, None)
        return (status, {"error": "unavailable", "detail": "later"}) if status else worker.fetch(body)

    worker.answers["/resources/fetch"] = fetch
    assert training.main(worker.arguments()) == 0


@pytest.mark.parametrize("kind", ["update", "metrics", "update-received", "status"])
def test_done_ends_the_run_after_any_report(make_worker: Callable[..., Any], kind: str) -> None:
    worker = make_worker(rounds=100, batches=3)

    def status(body: Any) -> tuple[int, Any]:
        mine = body if isinstance(body, str) else next(iter(body))
        answer = worker.status(body)
        return (200, {"type": "Done"}) if mine == kind else answer

    def trained(body: Any) -> tuple[int, Any]:
        code, answer = worker.trained(body)
        return code, answer | {"done": kind == "status"}

    worker.answers |= {"/status/send": status, "/status/batches": trained}
    assert training.main(worker.arguments()) == 0
    assert worker.done_rounds <= 1, "it went on after it was told that the job is done"


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"batch_size": "x"}, 2, "batch_size"),
        ({"task": "torch"}, 1, "torch_class"),
        ({"task": "causal-lm"}, 1, "causal-lm"),
        ({"task": "no-such"}, 2, "AutoModelForNoSuch"),
        ({"preprocessor": MODEL}, 2, "preprocessor 'image-classification' is unknown"),
        ({"inputs": ["pixels"]}, 1, "lacks the tensor 'pixels'"),
    ],
)
def test_an_unsupported_job_is_refused(
    make_worker: Callable[..., Any], fails: Callable[..., str], config: Any, code: int, words: str
) -> None:
    assert words in fails(training.main, make_worker().arguments(**config), code)


def test_a_slice_that_does_not_fit_the_model(
    make_worker: Callable[..., Any], tmp_path: Path, fails: Callable[..., str]
) -> None:
    path = tmp_path / "wide.safetensors"
    images = np.zeros((16, 3, 8, 8), "f4")
    for tensors, words in (
        ({"pixel_values": images, "labels": np.zeros(16, "i8")}, "cannot take a batch of"),
        ({"pixel_values": images[:, :1], "labels": np.full(16, 10)}, "10 is not a label of this model"),
        ({"pixel_values": images[:, :1] + np.nan, "labels": np.zeros(16, "i8")}, "the loss is nan"),
        ({"pixel_values": images}, "lacks the tensor 'labels'"),
    ):
        safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
        assert words in fails(training.main, make_worker(slices=[path]).arguments(), 1)


def test_a_work_directory_that_cannot_be_written(make_worker: Callable[..., Any], fails: Callable[..., str]) -> None:
    worker = make_worker(batches=3)
    (worker.work_dir / "update-1.safetensors").mkdir()
    assert "update-1.safetensors" in fails(training.main, worker.arguments(), 1)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("{", "--job: not JSON"),
        ("[]", "--job: expected a map"),
        ('{"executor": "train/diloco", "resources": {}}', "--job: settings: is missing"),
        ('{"settings": {"text": "resources/text"}}', "--job: settings.model: is missing"),
        ({"batch_size": 0}, "--job: settings.batch_size must be at least 1"),
        ({"micro_batch": 0}, "--job: settings.micro_batch must be at least 1"),
        ({"seed": -1}, "--job: settings.seed: "),
    ],
)
def test_what_is_no_task_that_trains_is_refused(
    make_worker: Callable[..., Any], fails: Callable[..., str], task: str | dict[str, int], words: str
) -> None:
    worker = make_worker()
    text = task if isinstance(task, str) else worker.job(**task)
    assert words in fails(training.main, [*worker.arguments()[:-1], text], 2)


def test_a_job_from_a_file(tmp_path: Path, make_worker: Callable[..., Any], fails: Callable[..., str]) -> None:
    worker = make_worker(rounds=1, batches=3)
    arguments = worker.arguments()
    (tmp_path / "job.json").write_text(arguments[-1])
    assert training.main([*arguments[:-1], f"@{tmp_path / 'job.json'}"]) == 0
    assert "job2.json" in fails(training.main, [*arguments[:-1], f"@{tmp_path / 'job2.json'}"], 2)


def test_a_delay_slows_every_batch(make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "0.05")
    worker = make_worker(rounds=1, batches=4)
    assert training.main(worker.arguments()) == 0
    assert all(report["status"]["batch_ms"] >= 50 for report in worker.reports[:4])


def test_a_delay_that_is_not_a_number_is_refused(
    make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "slow")
    assert "HYPHA_EXECUTOR_DELAY='slow'" in fails(training.main, make_worker().arguments(), 2)


def test_a_full_disk_exits_with_a_code_of_its_own_and_names_the_path(
    make_worker: Callable[..., Any], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(batches=3)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("hypha.accelerate_executor.diloco.replica.write_update", _raising(full))
    message = fails(training.main, worker.arguments(), os.EX_IOERR)
    assert message == f"{worker.work_dir}: No space left on device"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory: MemoryError"),
        (MemoryError("Unable to allocate 8 GiB for an array"), "out of memory: Unable to allocate 8 GiB for an array"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB."),
            "out of memory: the model cannot take a batch of {'pixel_values': [16, 1, 8, 8], 'labels': [16]}: "
            "CUDA out of memory. Tried to allocate 2 GiB.",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_exhausted_memory_has_an_exit_code_of_its_own_and_one_line(
    make_worker: Callable[..., Any],
    fails: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    line: str,
    place: str,
) -> None:
    if place == "forward":
        monkeypatch.setattr(LOSS, _raising(error))
    else:
        monkeypatch.setattr(torch.Tensor, "backward", _raising(error))
        line = f"out of memory: {' '.join(str(error).split())}" if str(error) else line
    assert line in fails(training.main, make_worker(batches=3).arguments(), 75)


LOADED = "transformers.AutoModelForImageClassification.from_pretrained"
STEPPED = "hypha.accelerate_executor.distributed.accelerator.clip_and_step"


@pytest.mark.parametrize(
    ("place", "error", "code", "line"),
    [
        (LOADED, torch.OutOfMemoryError("CUDA out of memory"), 75, "out of memory: the model cannot be loaded.*"),
        (LOSS, RuntimeError("mat1 and mat2 cannot be multiplied"), 1, ".*mat2 cannot be multiplied.*"),
        (STEPPED, RuntimeError("CUDA error: an ECC error"), 1, r"RuntimeError: CUDA error: an ECC error \(.*"),
    ],
    ids=["a model too large for memory", "another error of torch", "an error of the device"],
)
def test_an_error_of_torch_has_the_exit_code_of_its_kind(
    make_worker: Callable[..., Any],
    fails: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception,
    code: int,
    line: str,
) -> None:
    monkeypatch.setattr(place, _raising(error))
    assert re.fullmatch(line, fails(training.main, make_worker(batches=3).arguments(), code))


def test_a_command_ends_with_one_line_whatever_a_library_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha.accelerate_executor.modeling.evaluation.evaluate", _raising(KeyError("vocab")))
    arguments = ["evaluate", "--model", str(tmp_path), "--data", str(tmp_path)]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2
    assert re.fullmatch(r"Error: KeyError: 'vocab' \(test_executor_exit\.py:\d+\)\n", done.output)
    session = CliRunner().invoke(command, ["session"], input=f"{json.dumps(arguments)}\n")
    assert json.loads(session.output)["status"] == 2


def test_an_unforeseen_error_is_one_line_after_its_traceback(
    make_worker: Callable[..., Any],
    fails: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOSS, _raising(ZeroDivisionError("division\nby zero")))
    message = fails(training.main, make_worker(batches=3).arguments(), 2)
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_executor_exit\.py:\d+\)", message)
    assert "Traceback (most recent call last):" in capsys.readouterr().err


def test_a_request_in_another_thread_ends_before_the_connection_is_closed(make_worker: Callable[..., Any]) -> None:
    worker, asked, may_answer = make_worker(), threading.Event(), threading.Event()

    def answer(_: Any) -> tuple[int, Any]:
        asked.set()
        assert may_answer.wait(20)
        return 200, [{"path": "model", "metadata": {}}]

    worker.answers["/resources/fetch"] = answer
    reference = UriReference(value="https://x.invalid")
    with ThreadPoolExecutor(1) as thread:
        with Bridge(worker.socket, worker.work_dir, 30.0) as bridge:
            fetched = thread.submit(bridge.fetch, reference, ".")
            assert asked.wait(20)
        may_answer.set()
        [file] = fetched.result(20)
    assert file.path == worker.work_dir / "model"
    with pytest.raises(BridgeClosed, match="has closed the bridge"):
        bridge.fetch(reference, ".")
