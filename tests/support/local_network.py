"""A network of real processes for tests, configured by TOML files, on which jobs run one after the other.

Built on the modules of hypha_local in the order of its demo: layout, certificates, processes, probe.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil

from hypha_local.certificates import write_certificates
from hypha_local.datasets.digits import write_digits
from hypha_local.demo_tasks import DIGITS
from hypha_local.network_layout import Folders, NodePlan, Training, plan_nodes, write_configuration
from hypha_local.probe import wait_until_healthy
from hypha_local.processes import Child, Processes, script
from support.waiting import wait_until

KIND = 'kind = "diloco-transformer"'
"""The executor that the planned job asks of its training workers."""
MODEL = 'path = "../start-model"'
"""Where the job starts in the planned scheduler configuration."""


def executor(name: str, code: str) -> str:
    """Return TOML of an executor that runs a line of Python instead of training."""
    args = json.dumps(["-c", code])
    return f'\n[[executors]]\nclass = "train"\nname = "{name}"\nruntime = "process"\n' + (
        f"cmd = {json.dumps(sys.executable)}\nargs = {args}\n"
    )


def trainer(name: str, delay: float) -> str:
    """Return TOML of a training executor with another name, slowed by `delay` seconds per batch."""
    text = executor(name, "").rpartition("args = ")[0]
    args = ["-m", "hypha.accelerate_executor.training"]
    args += ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    return f'{text}args = {json.dumps(args)}\nenv = {{ HYPHA_EXECUTOR_DELAY = "{delay}" }}\n'


def processes_of(folder: Path) -> list[str]:
    """Return command lines of the processes that use a run directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(str(folder) in word for word in words):
            found.append(f"{process.pid}: {' '.join(words)[:200]}")
    return found


@dataclass(frozen=True, slots=True)
class Job:
    """One scheduler process with one job."""

    child: Child
    runs: Path

    @property
    def log(self) -> str:
        """Return the scheduler's log."""
        return self.child.log.read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind in ``metrics.jsonl`` so far."""
        lines = [line for path in self.runs.glob("*/metrics.jsonl") for line in path.read_bytes().splitlines(True)]
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == kind]

    def wait_for_round(self, number: int, timeout: float = 60.0) -> None:
        """Wait until a round is closed; fail if the job ends first."""

        def closed() -> bool:
            assert self.child.process.poll() is None, self.log
            return len(self.events("round")) >= number

        wait_until(closed, timeout, f"round {number}")

    def wait(self, timeout: float) -> int:
        """Wait for the scheduler; return its exit status."""
        return self.child.process.wait(timeout)


class LocalNetwork:
    """Gateway, data node, training workers and a parameter server; `job` starts a scheduler."""

    def __init__(self, root: Path, workers: int) -> None:
        """Plan the network; nothing runs before `up`."""
        self.folders = Folders(root)
        self.folders.make()
        self.nodes = {node.name: node for node in plan_nodes(workers)}
        self.processes = Processes(self.folders.logs)
        self.identity = write_certificates(self.folders.certificates, self.nodes.values())
        self._jobs = 0
        write_configuration(self.folders, self.nodes.values(), Training(workers=workers), sys.executable)

    def configuration(self, name: str) -> Path:
        """Return the path of a node's TOML file."""
        return self.folders.configuration / f"{name}.toml"

    def extend(self, name: str, toml: str) -> None:
        """Append to a node's TOML file."""
        path = self.configuration(name)
        path.write_text(path.read_text() + toml)

    def up(self) -> None:
        """Create model and data, start every node but the scheduler, and wait until all are healthy."""
        source = self.folders.data / "train.safetensors"
        write_digits(source, self.folders.test_set)
        dataset = ("--out", str(self.folders.data / DIGITS.name), "--slices", str(4 * len(self.trainers)))
        self._run("hypha-data", "prepare", str(source), *dataset)
        for name in self.daemons:
            self.start(name)
        model = ("--arch", "resnet-digits", "--task", "image-classification", "--out", str(self.folders.start_model))
        self._run("hypha-accelerate-executor", "create-model", *model)
        self.wait_healthy(*self.daemons)

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run([script(program), *args], capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr

    @property
    def daemons(self) -> list[str]:
        """Return the names of all nodes but the scheduler, which runs only as long as its job."""
        return [name for name in self.nodes if name != "scheduler"]

    @property
    def trainers(self) -> list[str]:
        """Return the names of the training workers."""
        return [name for name in self.nodes if name.startswith("worker-")]

    def start(self, name: str) -> Child:
        """Start a node from its TOML file."""
        program = self.nodes[name].program
        return self.processes.start(name, [script(program), "run", "--config", str(self.configuration(name))])

    def wait_healthy(self, *names: str) -> None:
        """Probe nodes until they are healthy."""

        async def main() -> None:
            with anyio.fail_after(60):
                await wait_until_healthy(self.identity, [self.nodes[name].address for name in names])

        anyio.run(main, backend="trio")

    def kill(self, name: str) -> None:
        """Kill a node with SIGKILL."""
        process = self.processes.child(name).process
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def revive(self) -> None:
        """Restart killed nodes and wait until they are healthy."""
        dead = [name for name in self.daemons if self.processes.child(name).process.poll() is not None]
        for name in dead:
            self.start(name)
        self.wait_healthy(*dead)

    def log(self, name: str) -> str:
        """Return a node's log."""
        return self.processes.child(name).log.read_text(errors="replace")

    def peer_id(self, name: str) -> str:
        """Return a node's peer id from its start-up log line."""
        found = re.search(r" is (12D3\w+), at ", self.log(name))
        assert found is not None, self.log(name)
        return found[1]

    def executors(self) -> list[psutil.Process]:
        """Return the processes that workers have started, those of their sandboxes included."""
        found = []
        for name in self.trainers:
            process = self.processes.child(name).process
            if process.poll() is None:
                found += psutil.Process(process.pid).children(recursive=True)
        return found

    def commands(self) -> list[psutil.Process]:
        """Return the innermost of `executors`: the configured commands, if these have started no processes."""
        started = self.executors()
        parents = {process.ppid() for process in started}
        return [process for process in started if process.pid not in parents]

    def job(
        self, *, rounds: int, kind: str | None = None, model: str | None = None, min_workers: int | None = None
    ) -> Job:
        """Start a scheduler with a new job for all training workers.

        Args:
            kind: name of the training workers' executor; by default the plan's.
            model: TOML that replaces the model's path.
            min_workers: training workers without which the job fails; by default all.
        """
        self._jobs += 1
        name = f"job-{self._jobs}"
        training = Training(workers=len(self.trainers), rounds=rounds)
        some = [self.nodes["gateway"], self.nodes["scheduler"]]
        write_configuration(self.folders, some, training, sys.executable)
        runs = self.folders.runs / name
        runs.mkdir()
        text = self.configuration("scheduler").read_text().replace('"../runs"', json.dumps(f"../runs/{name}"))
        if kind is not None:
            assert KIND in text
            text = text.replace(KIND, f'kind = "{kind}"')
        if model is not None:
            assert MODEL in text
            text = text.replace(MODEL, model)
        if min_workers is not None:
            count = f"num_workers = {len(self.trainers)}\n"
            assert count in text
            text = text.replace(count, f"{count}min_workers = {min_workers}\n")
        self.configuration(name).write_text(text)
        command = [script("hypha-scheduler"), "run", "--config", str(self.configuration(name))]
        return Job(self.processes.start(name, command), runs)

    def start_untrusted_worker(self, name: str) -> Child:
        """Start a worker whose certificate is signed by another authority."""
        [node] = [node for node in plan_nodes(1) if node.name == "worker-1"]
        stranger = NodePlan(name, node.program, node.role, node.port)
        folder = self.folders.root / "other-authority"
        folder.mkdir()
        write_certificates(folder, [stranger])
        write_configuration(self.folders, [self.nodes["gateway"], stranger], Training(), sys.executable)
        path = self.configuration(name)
        path.write_text(path.read_text().replace("../certs/", "../other-authority/"))
        return self.processes.start(name, [script(stranger.program), "run", "--config", str(path)])

    def down(self) -> dict[str, int]:
        """Stop every process; return exit statuses by name."""

        async def main() -> dict[str, int]:
            return await self.processes.stop()

        return anyio.run(main, backend="trio")


@contextmanager
def local_network(root: Path, workers: int = 2, **extensions: str) -> Iterator[LocalNetwork]:
    """Run a healthy network; at the end none of its processes is left.

    Args:
        extensions: TOML appended to a node's file, by node name with underscores for dashes.
    """
    network = LocalNetwork(root, workers)
    for name, toml in extensions.items():
        network.extend(name.replace("_", "-"), toml)
    try:
        network.up()
        yield network
    finally:
        network.down()
    assert processes_of(root) == []
