"""A graph of tasks in chains of ten, on four leases of one worker, against plain starts of the same command.

Gateway, worker and scheduler are processes of their own. The time is from submitting the job until it has ended: with
leases, results that the next task of a chain reads, and the journal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Final

from benchmarks.job_network import JobNetwork, job_network
from benchmarks.run import BenchmarkRun, between
from benchmarks.tables import Row

CHAIN: Final = 10
LEASES: Final = 4
COMMAND: Final = (sys.executable, "-c", "pass")


LAYERS: Final = ("bubblewrap", "cgroup", "landlock", "own-uid", "rlimits", "supervisor")


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure jobs and plain starts in turns, after one job that warms everything up; then with isolation."""
    count = max(CHAIN, 2 * run.count // CHAIN * CHAIN)
    what = f"{count} tasks in chains of {CHAIN}, {LEASES} leases"
    return [
        _compare(run, count, f"{what}, no layer of isolation", LAYERS, "<= 2.5"),
        _compare(run, count, f"{what}, all layers that work here", (), ""),
    ]


def _compare(run: BenchmarkRun, count: int, what: str, disabled: Sequence[str], limit: str) -> Row:
    with job_network(_worker(disabled)) as network:
        _run_job(network, CHAIN)
        found = between(lambda: _start_plainly(count), lambda: _run_job(network, count), run.repeat)
    plain, ours = map(median, zip(*found, strict=True))
    ratio = median(one / other for other, one in found)
    return Row(what, "s", ours, plain, "plain starts", ratio, limit)


def _start_plainly(count: int) -> float:
    """Return the seconds for starting the command `count` times, as many at a time as there are leases."""
    began = time.perf_counter()
    with ThreadPoolExecutor(LEASES) as pool:
        list(pool.map(lambda _: subprocess.run(COMMAND, check=True), range(count)))
    return time.perf_counter() - began


def _graph(count: int) -> list[dict[str, Any]]:
    """Return tasks in chains: each has an output, which the next one reads."""
    tasks = []
    for number in range(count):
        task: dict[str, Any] = {"name": f"t{number}", "driver": {"shell/pass": {}}, "outputs": {"out": "job.json"}}
        if number % CHAIN:
            task["resources"] = [{"name": "before", "result": {"task": f"t{number - 1}", "output": "out"}}]
        tasks.append(task | {"keep": []})
    return tasks


def _run_job(network: JobNetwork, count: int) -> float:
    began = time.perf_counter()
    network.run({"type": "tasks", "workers": LEASES, "tasks": _graph(count)})
    return time.perf_counter() - began


def _worker(disabled: Sequence[str]) -> str:
    """Return TOML of a worker with all leases."""
    table = f"cmd = {json.dumps(COMMAND[0])}\nargs = {json.dumps(COMMAND[1:])}\n"
    resources = f"[resources]\ncpu = {LEASES}\nstorage = 20\n[resources.default]\ncpu = 1\nstorage = 1\n"
    isolation = f"[isolation]\ndisable = {json.dumps(list(disabled))}\n"
    return f'{isolation}{resources}[[executors]]\nclass = "shell"\nname = "pass"\nruntime = "process"\n{table}'
