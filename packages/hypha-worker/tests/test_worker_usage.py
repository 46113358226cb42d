"""Measuring what a job's processes use, and the metrics of a running executor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from hypha_worker.hardware import usage
from hypha_worker.hardware.usage import ProcessUsage, UsageAccumulator, read_tree


def test_use_of_starting_and_ending_processes_is_summed() -> None:
    accumulator = UsageAccumulator()
    first, second = (10, 1.0), (11, 2.0)
    assert accumulator.add_sample({first: ProcessUsage(2.0, 1.0, 100, 50, 1000)}) == ProcessUsage(
        2.0, 1.0, 100, 50, 1000
    )
    both = {first: ProcessUsage(3.0, 1.5, 150, 50, 900), second: ProcessUsage(5.0, 0.0, 10, 0, 300)}
    assert accumulator.add_sample(both) == ProcessUsage(6.0, 0.5, 60, 0, 1200)
    assert accumulator.add_sample({second: ProcessUsage(5.5, 0.0, 10, 7, 300)}) == ProcessUsage(0.5, 0.0, 0, 7, 300)
    assert accumulator.add_sample({(10, 9.0): ProcessUsage(0.25, 0.0, 1, 0, 10)}) == ProcessUsage(0.25, 0.0, 1, 0, 10)


def test_a_process_tree_is_read_and_an_ended_one_is_empty() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = read_tree(os.getpid())
        assert {child.pid, os.getpid()} <= {pid for (pid, _), use in seen.items() if use.memory > 0}
        child.communicate(b"\n")
    assert read_tree(child.pid) == {}


async def test_a_job_is_counted_measured_and_traced(
    in_lab: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.1)  # the first sample may see a process that has just been forked

    least: list[float] = []
    began = time.monotonic()
    async with in_lab() as lab:
        await lab.start("while not os.path.exists(work_dir + '/go'): time.sleep(0.01)\n")
        await lab.scheduler.until(lambda: recorded.total("process.memory.usage") > 1 << 20)
        seen, count = time.monotonic(), len(recorded.values)
        await lab.scheduler.until(lambda: len(recorded.values) > count)
        least.append(time.monotonic() - seen)
        [work_dir] = lab.folder.glob("work/hypha-*")
        (work_dir / "go").touch()
        await lab.scheduler.ended()
    lasted = time.monotonic() - began
    assert recorded.total("hypha.worker.tasks.started") == recorded.total("hypha.worker.tasks.ended") == 1
    assert recorded.total("hypha.worker.tasks.active") == recorded.total("hypha.worker.executors.active") == 0
    assert least[0] < recorded.total("hypha.worker.task.duration", hypha_outcome="finished") < lasted
    assert ("hypha.worker.executors.ended", 1, {"process.exit.code": "0"}) in recorded.values
    assert recorded.total("hypha.worker.executor.processes") >= 1
    assert {"process.memory.usage", "hypha.worker.prefetch.depth"} <= recorded.gone
    assert {"evaluate", "offer", "WorkerOffer", "execute task"} <= {span.name for span in recorded.spans}
    assert ("hypha.worker.requests", 1, {"hypha.offered": True}) in recorded.values
    assert ("hypha.worker.lease.renewals", 1, {"hypha.outcome": "renewed"}) in recorded.values
