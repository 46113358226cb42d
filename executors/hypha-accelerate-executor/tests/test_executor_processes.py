"""An executor with several processes and accelerate's configuration: the update equals that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loopback_ports import free_port
from support.waiting import wait_until

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.microbatches import count_labels, split_batch
from hypha_proto.update_file import UpdateMetadata, open_update, write_update

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

# an epsilon well above rounding errors of gradients, which AdamW's first steps would amplify to a whole learning rate
OPTIMIZER = {"learning-rate": 3e-3, "epsilon": 1e-3, "max-grad-norm": 0.5}


@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=17),
    processes=st.integers(1, 4),
    micro=st.integers(1, 3),
)
@settings(max_examples=150)
def test_micro_batches_contain_every_weighted_row_once(rows: list[int], processes: int, micro: int) -> None:
    labels = torch.full((len(rows), 7), -100)
    for row, count in enumerate(rows):
        labels[row, 1 : 1 + count] = row
    micro_batches = split_batch({"labels": labels, "x": torch.arange(len(rows))}, processes, micro, shifted=True)
    assert len(micro_batches) == processes
    counted = [micro_batch for part in micro_batches for micro_batch in part if micro_batch.weight > 0]
    if not any(rows):
        assert micro_batches == [[]] * processes
        return
    assert sum(micro_batch.weight for micro_batch in counted) == pytest.approx(1.0)
    seen = [row for micro_batch in counted for row in micro_batch.arguments["x"].tolist()]
    assert [row for row in seen if rows[row]] == [row for row, count in enumerate(rows) if count]
    if processes > 1:
        assert {len(part) for part in micro_batches} == {micro}
        assert all(len(micro_batch.arguments["x"]) for part in micro_batches for micro_batch in part)


def test_labels_are_counted_as_in_the_loss() -> None:
    assert count_labels({"x": torch.zeros(3)}, False) == 3
    assert count_labels({"labels": torch.tensor([1, -100, 2])}, False) == 2
    assert count_labels({"labels": torch.tensor([[1, 2, -100], [1, -100, -100]])}, True) == 1
    assert count_labels({"labels": torch.zeros(3, 2)}, False) == 6
    assert count_labels({"labels": torch.tensor([[1, 255], [-100, 2]])}, False, 255) == 3


def _launched(processes: int) -> list[dict[str, str]]:
    """Return the environment that a launcher gives each of its processes."""
    alike = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    alike |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@pytest.fixture
def start(
    make_worker: Callable[..., Any], text_slices: list[Path], llama: Path
) -> Iterator[Callable[..., tuple[Any, list[subprocess.Popen[str]]]]]:
    """Start the processes of an executor for a text job; kill them at the end."""
    running: list[subprocess.Popen[str]] = []

    def begin(processes: int = 1, rounds: int = 2, **variables: str) -> tuple[Any, list[subprocess.Popen[str]]]:
        worker = make_worker(rounds=rounds, batches=5, model_dir=llama, slices=text_slices)
        arguments = worker.arguments(task="causal-lm", optimizer=OPTIMIZER, batch_size=7)
        command = [sys.executable, "-m", "hypha.accelerate_executor.training", *arguments, "--timeout", "60"]
        mine = [
            subprocess.Popen(command, env=os.environ | launched | variables, stderr=subprocess.PIPE, text=True)
            for launched in (_launched(processes) if processes > 1 else [{"OMP_NUM_THREADS": "1"}])
        ]
        running.extend(mine)
        return worker, mine

    yield begin
    _kill(running)


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for a successful job; return the output of each process."""
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    except subprocess.TimeoutExpired:
        _kill(processes)
        raise
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(errors)
    return errors


@pytest.fixture
def plain(make_worker: Callable[..., Any], text_slices: list[Path], llama: Path) -> Any:
    """Run the same job in one process without accelerate."""
    worker = make_worker(rounds=2, batches=5, model_dir=llama, slices=text_slices)
    assert training.main(worker.arguments(task="causal-lm", optimizer=OPTIMIZER, batch_size=7)) == 0
    return worker


def _same(worker: Any, plain: Any, tolerance: float = 2e-6) -> None:
    assert len(worker.updates) == len(plain.updates) == 2
    for number in range(2):
        (mine, _), (other, _) = worker.update(number), plain.update(number)
        assert mine.keys() == other.keys()
        assert max(np.abs(value).max() for value in other.values()) > 1e-3
        for name, value in mine.items():
            np.testing.assert_allclose(value, other[name], atol=tolerance, rtol=0, err_msg=name)
    np.testing.assert_allclose(_losses(worker), _losses(plain), rtol=1e-4)


def _losses(worker: Any) -> list[float]:
    return [each["loss"] for each in worker.metrics]


@pytest.mark.parametrize("micro", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_two_processes_produce_the_update_of_one(start: Callable[..., Any], plain: Any, micro: str) -> None:
    worker, processes = start(2, ACCELERATE_GRADIENT_ACCUMULATION_STEPS=micro)
    leader, follower = _finish(processes)
    _same(worker, plain)
    assert "2 processes" in leader
    assert "Traceback" not in leader + follower
    # only the leader used the bridge: every report arrived once
    assert [report for report in worker.reports if isinstance(report, str)] == ["update", "update-received"] * 2
    assert sum("status" in report for report in worker.reports if isinstance(report, dict)) == 10


def test_micro_batches_produce_the_update_of_the_whole_batch(start: Callable[..., Any], plain: Any) -> None:
    worker, processes = start(ACCELERATE_USE_CPU="true", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3")
    _finish(processes)
    _same(worker, plain)


def test_bf16_computes_in_half_and_keeps_float32_weights(start: Callable[..., Any], plain: Any) -> None:
    worker, processes = start(ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="bf16")
    _finish(processes)
    assert _losses(worker) != _losses(plain)
    np.testing.assert_allclose(_losses(worker), _losses(plain), rtol=0.02)
    file, _ = open_update(worker.updates[0])
    with file:
        assert {info.dtype for info in file.tensors.values()} == {"F32"}


def test_fp16_on_a_cpu_is_refused_in_one_line(start: Callable[..., Any]) -> None:
    _, [process] = start(ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="fp16")
    _, error = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "mixed_precision: 'fp16' needs a GPU" in error.splitlines()[-1]


SHARDED = """
import sys
from pathlib import Path
import safetensors.torch, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hypha.accelerate_executor.modeling.hf import load_model
from hypha.accelerate_executor.diloco.replica import Replica
from hypha.accelerate_executor.distributed.state_dict import ShardedWeights

model_dir, out = map(Path, sys.argv[1:])
dist.init_process_group("gloo")
leads = dist.get_rank() == 0
model = load_model("causal-lm", model_dir)
replica = Replica(model, model_dir, leads)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
weights = ShardedWeights(model, replica.members)
replica.attach_weights(weights)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.5)
    assert sum(parameter.to_local().numel() for parameter in model.parameters()) < 4000
if leads:
    replica.write_update(out / "update.safetensors", 1, 1)
    replica.merge(out / "outer.safetensors")
else:
    weights.gather()
    weights.load({})
after = weights.gather()
if leads:
    safetensors.torch.save_file({name: value.contiguous() for name, value in after.items()}, out / "after.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_weights_in_shards_are_gathered_and_set(llama: Path, tmp_path: Path) -> None:
    """FSDP shards on two CPU processes, which torch supports and Accelerate does not."""
    stored = safetensors.numpy.load_file(llama / "model.safetensors")
    shapes = {name: value.shape for name, value in stored.items()}
    outer = {name: np.full_like(value, 0.25) for name, value in stored.items()}
    write_update(tmp_path / "outer.safetensors", shapes, outer.items(), UpdateMetadata())
    command = [sys.executable, "-c", SHARDED, str(llama), str(tmp_path)]
    running = [
        subprocess.Popen(command, env=os.environ | several, stderr=subprocess.PIPE, text=True)
        for several in _launched(2)
    ]
    _finish(running)
    file, _ = open_update(tmp_path / "update.safetensors")
    with file:
        assert file.tensors.keys() == stored.keys()
        for name in stored:
            np.testing.assert_allclose(file.tensor(name), np.full_like(stored[name], 0.5), atol=1e-6)
    for name, value in safetensors.numpy.load_file(tmp_path / "after.safetensors").items():
        np.testing.assert_array_equal(value, stored[name] + np.float32(0.25))


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [0, 1])
def test_all_processes_exit_when_one_is_lost(start: Callable[..., Any], lost: int) -> None:
    worker, processes = start(2, rounds=100_000)

    def trained() -> bool:
        assert [process.poll() for process in processes] == [None, None], "one ended by itself"
        return bool(worker.done_rounds >= 1)

    wait_until(trained, 120, "the end of the first round")
    processes[lost].kill()
    _, error = processes[1 - lost].communicate(timeout=60)
    assert processes[1 - lost].returncode == 1
    assert "another process of this executor has ended" in error


@pytest.mark.nightly
def test_accelerate_launch_with_a_configuration_file(
    make_worker: Callable[..., Any], text_slices: list[Path], llama: Path, plain: Any, tmp_path: Path
) -> None:
    """The command of a worker's owner: `accelerate launch --config_file`, two processes, micro-batches."""
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: true\nnum_machines: 1\n"
        "num_processes: 2\nmachine_rank: 0\nmixed_precision: 'no'\n"
        "rdzv_backend: static\nsame_network: true\nmain_training_function: main\n"
    )
    worker = make_worker(rounds=2, batches=5, model_dir=llama, slices=text_slices)
    arguments = worker.arguments(task="causal-lm", optimizer=OPTIMIZER, batch_size=7)
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(config)]
    command += ["--gradient_accumulation_steps", "2", "--main_process_port", "0"]  # the first has no key in the file
    command += ["-m", "hypha.accelerate_executor.training", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    _same(worker, plain)
    assert "2 processes" in done.stderr
