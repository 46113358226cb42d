"""A graph of tasks in chains of ten, on three leases of one worker, against plain starts of the same command.

Gateway, worker and scheduler are processes of their own. The time is from submitting the job until it has ended: with
leases, results that the next task of a chain reads, and the journal.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_local.certificates import write_certificates
from hypha_local.network_layout import Folders, plan_nodes
from hypha_local.probe import wait_until_healthy
from hypha_local.processes import Processes, script

CHAIN: Final = 10
LEASES: Final = 3
COMMAND: Final = (sys.executable, "-c", "pass")
START_TIMEOUT: Final = 60.0
TIMEOUT: Final = 600.0
"""Seconds for one job."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both in turns, after one job that warms everything up."""
    count = max(CHAIN, 2 * run.count // CHAIN * CHAIN)
    ours, plain = [], []
    with _network(run.folder / "network") as socket:
        _run_job(run.folder, socket, CHAIN)
        for _ in range(run.repeat):
            plain.append(_start_plainly(count))
            ours.append(_run_job(run.folder, socket, count))
    (run.folder / "job.json").unlink()
    ratio = sorted(one / other for one, other in zip(ours, plain, strict=True))[len(ours) // 2]
    what = f"{count} tasks in chains of {CHAIN}, {LEASES} leases"
    return [Row(what, "s", sorted(ours)[len(ours) // 2], sorted(plain)[len(plain) // 2], "plain starts", ratio, "<= 3")]


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
        task: dict[str, Any] = {"name": f"t{number}", "driver": {"shell/pass": {}}, "outputs": {"log": "executor.log"}}
        if number % CHAIN:
            task["resources"] = [{"name": "before", "result": {"task": f"t{number - 1}", "output": "log"}}]
        tasks.append(task | {"keep": []})
    return tasks


def _run_job(folder: Path, socket: Path, count: int) -> float:
    job = folder / "job.json"
    job.write_text(json.dumps({"type": "tasks", "workers": LEASES, "tasks": _graph(count)}))
    command = [script("hypha-scheduler"), "submit", str(job), "--socket", str(socket)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the job failed: {done.stderr}")
    return time.perf_counter() - began


@contextmanager
def _network(root: Path) -> Iterator[Path]:
    """Run a gateway, a worker and a scheduler; yield the socket at which the scheduler takes jobs."""
    folders = Folders(root)
    folders.make()
    nodes = {node.name: node for node in plan_nodes(1)}
    identity = write_certificates(folders.certificates, nodes.values())
    table = f"cmd = {json.dumps(COMMAND[0])}\nargs = {json.dumps(COMMAND[1:])}\n"
    executor = f'[[executors]]\nclass = "shell"\nname = "pass"\nruntime = "process"\n{table}'
    resources = f"[resources]\ncpu = {LEASES}\nstorage = 20\n[resources.default]\ncpu = 1\nstorage = 1\n"
    own = {
        "gateway": 'state_dir = "../work"\n',
        "worker-1": f'work_dir = "../work/worker-1"\n{resources}{executor}',
        "scheduler": 'output_dir = "../runs"\n',
    }
    gateway = [nodes["gateway"].address]
    processes = Processes(folders.logs)
    try:
        for name, settings in own.items():
            common: dict[str, Any] = {f"{kind}_pem": f"../certs/{name}-{kind}.pem" for kind in ("cert", "key", "trust")}
            common |= {"listen_addresses": [nodes[name].address], "exclude_cidr": []}
            common["gateway_addresses"] = [] if name == "gateway" else gateway
            path = folders.configuration / f"{name}.toml"
            path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in common.items()) + settings)
            processes.start(name, [script(nodes[name].program), "run", "--config", str(path)])

        async def until_healthy() -> None:
            with anyio.fail_after(START_TIMEOUT):
                await wait_until_healthy(identity, [nodes[name].address for name in own])

        anyio.run(until_healthy, backend="trio")
        yield folders.runs / "scheduler.sock"
    finally:
        anyio.run(processes.stop, backend="trio")
        shutil.rmtree(root)
