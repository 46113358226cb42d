"""The inference executor on a worker: model, slices and results over the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_net import rpc, transfer
from hypha_proto.datasets import DATA, DataRequest, NotFound, SliceAssigned
from hypha_proto.tasks import PeersSource, SlicesSource, TaskResource, TaskSpec
from hypha_proto.transfer import TASK_RESULT, PullRequest

EXECUTOR = {
    "class": "inference",
    "name": "transformers",
    "cmd": sys.executable,
    "args": [
        "-m", "hypha.accelerate_executor.inference",
        "--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}",
    ],
    "env": {"OMP_NUM_THREADS": "1"},
}  # fmt: skip
ROWS = (5, 3)


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Create the model of the digits demo; return its files."""
    out = tmp_path / "model"
    code = "from hypha.accelerate_executor.cli import main; main()"
    command = [sys.executable, "-c", code, "create-model", "--arch", "resnet-digits", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return sorted(out.iterdir())


def write_slice(path: Path, index: int) -> None:
    """Write images as JSON lines; the last row has none."""
    image = [[[0.1 * index] * 8] * 8]
    rows = [{"pixel_values": image, "name": f"row {number}"} for number in range(ROWS[index] - 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"name": "empty"}]))


@pytest.mark.nightly
@pytest.mark.timeout(120)
async def test_a_task_computes_its_slices_and_sends_their_results(
    in_task_lab: Any, push_receiver: Any, model: list[Path]
) -> None:
    async with in_task_lab(executors=[EXECUTOR], requested="inference/transformers") as (lab, tasks, lease):
        given: list[DataRequest] = []

        async def assign(_peer: Any, request: DataRequest) -> SliceAssigned | NotFound:
            given.append(request)
            if len(given) > len(ROWS):
                return NotFound()
            return SliceAssigned(data_provider=lab.data.peer_id, index=len(given) - 1, epoch=0, format="jsonl")

        async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource:
            if request.dataset == "model":
                return transfer.PullSource(model[request.index])
            path: Path = lab.folder / f"rows-{request.index}"
            write_slice(path, request.index)
            return transfer.PullSource(path)

        rpc.serve(lab.scheduler.endpoint, DATA, assign)
        transfer.serve_pulls(lab.data, resolve)
        receiver = push_receiver(lab.scheduler.endpoint, lab.folder / "results")
        receiver.listen()
        settings = {
            "task": "classify",
            "model": {"type": "image-classification", "input_names": ["pixel_values"], "path": "model"},
            "preprocessor": None,
            "inference": {"batch_size": 2},
            "columns": ["name"],
        }
        source = PeersSource((lab.data.peer_id,), "model", 0, tuple(path.name for path in model))
        resources = (
            TaskResource(name="model", peers=source),
            TaskResource(name="slices", slices=SlicesSource("rows")),
        )
        spec = TaskSpec(
            executor="inference/transformers", settings=json.dumps(settings), resources=resources, sends=True
        )
        tasks.define(lease, "infer", start=spec)
        report = await tasks.end("infer", seconds=90.0)
        assert report.finished is not None, report
        parts = {header.name: content for _, header, content in receiver.files}
        assert {header.kind for _, header, _ in receiver.files} == {TASK_RESULT}
        assert sorted(parts) == ["part-0.jsonl", "part-1.jsonl"]
        for index, count in enumerate(ROWS):
            rows = [json.loads(line) for line in parts[f"part-{index}.jsonl"].splitlines()]
            assert [(row["slice"], row["row"]) for row in rows] == [(index, row) for row in range(count)]
            assert [row["name"] for row in rows] == [*(f"row {number}" for number in range(count - 1)), "empty"]
            assert all(0 <= row["label"] <= 9 for row in rows[:-1])
            assert rows[-1]["error"]["kind"] == "missing-column"
        metrics = [report.progress.metrics for report in tasks.of("infer") if report.progress is not None]
        assert metrics[-1] is not None
        assert (metrics[-1]["rows"], metrics[-1]["errors"]) == (sum(ROWS), len(ROWS))
