"""A network of real processes on which inference jobs run: gateway, data node, workers, and a waiting scheduler.

The workers classify handwritten digits with a model that was not trained. Their executors wait at every batch, so that
jobs last long enough for faults; while files exist they compute nothing, or die of one row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hypha_local.datasets.digits import load_digits
from hypha_local.processes import script
from support.local_network import processes_of
from support.task_network import Submission, TaskNetwork

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
    network = InferenceNetwork(root, workers, delay)
    try:
        network.up()
        yield network
    finally:
        network.down()
    assert processes_of(root) == []
