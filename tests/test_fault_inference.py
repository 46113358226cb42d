"""Faults during inference jobs on a real network: every row gets one result, as `hypha-scheduler audit` proves.

The workers classify handwritten digits with a model that was not trained. Their executors wait at every batch, so that
jobs last long enough for faults; while files exist they compute nothing, or die of one row.

Parts that are cut, corrupt, of another slice or sent twice are faults of workers that no real one has: see
``test_inference_job.py`` of the scheduler.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from support.local_network import running
from support.task_network import Submission, TaskNetwork
from support.waiting import wait_until

from hypha_local.datasets.digits import load_digits
from hypha_local.processes import script

ROWS: Final = 180
SLICES: Final = 30
DEADLY: Final = 100
"""Number of the row that executors die of while `InferenceNetwork.poison` exists."""
_MARK: Final = 0.3
"""Value of a pixel of that row alone: all others are multiples of 1/16."""
_EXECUTOR: Final = """
import os, signal, sys, time
import torch
from hypha.accelerate_executor.inference import main

def wait_or_die(module, inputs):
    while os.path.exists({hold!r}):
        time.sleep(0.05)
    if inputs and torch.is_tensor(inputs[0]) and os.path.exists({poison!r}):
        if ((inputs[0] - {mark}).abs() < 1e-6).any():
            os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
torch.nn.modules.module.register_module_forward_pre_hook(wait_or_die)
sys.exit(main())
"""


def executor(switches: Path, delay: float) -> str:
    """Return TOML of the executor, which waits `delay` seconds at every batch and looks for files in `switches`."""
    args = ["-c", _EXECUTOR.format(poison=str(switches / "poison"), hold=str(switches / "hold"), mark=_MARK)]
    args += ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    table = '\n[[executors]]\nclass = "inference"\nname = "transformers"\nruntime = "process"\n'
    table += f"readable = {json.dumps([str(switches)])}\n"
    return f"{table}cmd = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\n" + (
        f'env = {{ HYPHA_EXECUTOR_DELAY = "{delay}" }}\n'
    )


class InferenceNetwork(TaskNetwork):
    """A network whose workers offer inference besides tasks."""

    def __init__(self, root: Path, workers: int, delay: float) -> None:
        """Plan the network; executors wait `delay` seconds at every batch."""
        super().__init__(root, workers, leases=1)
        switches = root / "switches"
        switches.mkdir()
        self.poison = switches / "poison"
        """While it exists, executors die of the row `DEADLY`."""
        self.hold = switches / "hold"
        """While it exists, executors compute nothing."""
        for name in self.trainers:
            self.extend(name, executor(switches, delay))

    def up(self) -> None:
        """Create the model, then as `TaskNetwork`."""
        model = ("--arch", "resnet-digits", "--task", "image-classification", "--out", str(self.folders.start_model))
        self._run("hypha-accelerate-executor", "create-model", *model)
        super().up()

    def _write_dataset(self) -> None:
        import numpy
        from safetensors.numpy import save_file

        pixels = (load_digits()[0][:ROWS].reshape(-1, 1, 8, 8) / 16.0).astype(numpy.float32)
        pixels[DEADLY, 0, 0, 0] = _MARK
        source = self.folders.data / "numbers.safetensors"
        save_file({"pixel_values": pixels, "number": numpy.arange(ROWS, dtype=numpy.int64)}, source)
        out = str(self.folders.data / "numbers")
        self._run("hypha-data", "prepare", str(source), "--out", out, "--slices", str(SLICES))

    def classify(self, *, batch_size: int = ROWS // SLICES, **resources: Any) -> Submission:
        """Submit a job that classifies every row; return when it is accepted."""
        model = {"path": str(self.folders.start_model), "type": "vision-classification"}
        job = {
            "type": "inference", "dataset": "numbers", "model": model,
            "inference": {"task": "classify", "batch_size": batch_size}, "results": {"columns": ["number"]},
            "resources": {"num_workers": 2, "worker": {"cpu": 1}} | resources,
        }  # fmt: skip
        return self.submit(job)

    def check(self, job: Submission) -> None:
        """Check that every row of the dataset has one result, by the command `audit` and by the column `number`."""
        command = [script("hypha-scheduler"), "audit", str(job.directory)]
        audit = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert audit.returncode == 0, audit.stderr
        rows = self.rows(job)
        assert sorted(row["number"] for row in rows) == list(range(ROWS))
        assert all(0 <= row["label"] <= 9 for row in rows)
        assert len(job.records("part")) == SLICES

    @staticmethod
    def rows(job: Submission) -> list[dict[str, Any]]:
        """Return the results of a job."""
        parts = sorted((job.directory / "results").glob("part-*.jsonl"))
        return [json.loads(line) for path in parts for line in path.read_text().splitlines()]


@contextmanager
def inference_network(root: Path, workers: int = 3, delay: float = 0.3) -> Iterator[InferenceNetwork]:
    """Run a healthy network; at the end none of its processes is left."""
    with running(InferenceNetwork(root, workers, delay)) as network:
        yield network


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

IN_HAND = 2
"""Slices that an executor has at a time."""
A_SLICE = ROWS // SLICES


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with inference_network(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_process_is_left(network: InferenceNetwork) -> Iterator[None]:
    yield
    network.poison.unlink(missing_ok=True)
    network.hold.unlink(missing_ok=True)
    network.revive()
    network.check_quiet()


def wait_for_parts(job: Submission, count: int, timeout: float = 60.0) -> None:
    """Wait until so many parts are committed; fail if the job ends first."""

    def enough() -> bool:
        assert job.process.poll() is None, job.process.communicate()
        return len(job.records("part")) >= count

    wait_until(enough, timeout, f"{count} parts")


def a_worker_of(network: InferenceNetwork, job: Submission) -> str:
    """Wait for a part; return the name of the worker that sent it."""
    wait_for_parts(job, 1)
    wait_until(lambda: bool(job.events("part")), 60, "the event of a part")
    return network.worker_of(job.events("part")[0]["worker"])


@pytest.mark.gate
def test_a_killed_worker_costs_what_it_had_in_hand(network: InferenceNetwork) -> None:
    job = network.classify(num_workers=3)
    name = a_worker_of(network, job)
    wait_for_parts(job, SLICES * 4 // 10)
    network.kill(name)
    summary = job.wait(90)
    network.check(job)
    assert summary["rows_assigned"] <= ROWS + IN_HAND * A_SLICE
    assert len(job.events("worker_lost")) == 1


def test_a_job_whose_scheduler_was_killed_is_resumed(network: InferenceNetwork) -> None:
    job = network.classify()
    wait_for_parts(job, 5)
    network.hold.touch()
    network.kill("scheduler")
    network.hold.unlink()
    assert job.process.wait(60) == 3
    committed = [record["slice"] for record in job.records("part")]
    assert len(committed) < SLICES
    summary = network.resume(job).wait(90)
    network.check(job)
    assert [record["slice"] for record in job.records("part")][: len(committed)] == committed
    assert summary["rows"] == ROWS
    assert summary["rows_assigned"] <= ROWS - (len(committed) - IN_HAND) * A_SLICE


def test_an_executor_that_dies_of_one_row_fails_the_job_which_is_resumed(network: InferenceNetwork) -> None:
    network.poison.touch()
    job = network.classify()
    why = job.wait_for_failure(120)
    assert f"exit code {-signal.SIGKILL}" in why
    network.poison.unlink()
    network.resume(job).wait(60)
    network.check(job)
    [index] = [row["slice"] for row in network.rows(job) if row["number"] == DEADLY]
    assert f"slice {index} " in why
