"""Costs of isolation: the start of a confined process, and training in it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import anyio

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_proto.resources import Resources
from hypha_worker.executors.isolation.layers import Confinement, Launch
from hypha_worker.executors.isolation.stack import IsolationStack, make_stack
from hypha_worker.executors.isolation.visible_paths import program_paths
from hypha_worker.executors.process.environment import base_environment
from hypha_worker.executors.process.spawn import spawn
from hypha_worker.leasing.capacity import Allocation

STARTS = 20
STEPS = 300
TRAINS = f"""
import time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.rand(64, 1, 8, 8), torch.randint(0, 10, (64,))
def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
steps(30)
began = time.perf_counter()
steps({STEPS})
print(64 * {STEPS} / (time.perf_counter() - began))
"""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure each in turns with the same without isolation."""
    stack = make_stack(run.folder)
    names = ", ".join(layer.name for layer in stack.layers)
    rows = [_start(run, stack, names), _train(run, stack, names)]
    for path in run.folder.glob("job-*"):
        for made in path.iterdir():
            made.unlink()
        path.rmdir()
    return rows


def _start(run: BenchmarkRun, stack: IsolationStack, names: str) -> Row:
    confined, plain = [], []
    for number in range(min(STARTS, 4 * run.repeat)):
        plain.append(_plain(["/bin/echo"])[0])
        confined.append(
            anyio.run(_confined, stack, _make_folder(run.folder / f"job-{number}"), ["/bin/echo"], backend="trio")[0]
        )
    ours, reference = (1000 * statistics.median(values) for values in (confined, plain))
    what = f"start of a process in {names}, to its first output"
    return Row(what, "ms", ours, reference, "subprocess", ours / reference, "≤ 50 ms more")


def _train(run: BenchmarkRun, stack: IsolationStack, names: str) -> Row:
    command = [sys.executable, "-c", TRAINS]
    pairs = []
    for number in range(run.repeat):
        confined = float(
            anyio.run(_confined, stack, _make_folder(run.folder / f"job-t{number}"), command, backend="trio")[1]
        )
        pairs.append((confined, float(_plain(command)[1])))
    ours, reference = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(mine / other for mine, other in pairs)
    return Row("training in the same layers", "samples/s", ours, reference, "subprocess", ratio, "≥ 0.98")


def _plain(command: list[str]) -> tuple[float, str]:
    """Run a command; return the seconds to its first output, and its output."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1 << 16)
        took = time.perf_counter() - began
        return took, (first + process.stdout.read()).decode()


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "socket").touch()
    return folder


async def _confined(stack: IsolationStack, folder: Path, command: list[str]) -> tuple[float, str]:
    """Run a command in the layers; return the seconds to its first output, and its output."""
    allocation = Allocation(Resources(cpu=2.0, memory=4.0))
    shown = program_paths(Path(command[0]))
    confinement = Confinement(folder.name, folder, folder / "socket", allocation, 10**9, readable=shown)
    began = time.perf_counter()
    async with stack.confine(confinement) as confined:
        launch = Launch(list(command), base_environment(folder, allocation.resources, ()))
        confined.apply(launch)
        process = await spawn(launch, folder)
        output = await process.stdout.receive()
        took = time.perf_counter() - began
        try:
            while True:
                output += await process.stdout.receive()
        except anyio.EndOfStream:
            code = await process.wait()
        process.close()
    if code != 0:
        raise RuntimeError(f"{json.dumps(command)[:80]} exited with {code}: {output.decode()}")
    return took, output.decode()
