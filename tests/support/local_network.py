"""A whole network for tests: real processes from TOML files, up and healthy, with jobs run on it one after the other.

Stands on hypha_local's rooms, in the order of its demo: plan, certificates, processes, probe.
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
"""What the plan's job asks of its training workers."""
MODEL = 'path = "../start-model"'
"""Where the plan's job begins."""


def executor(name: str, code: str) -> str:
    """TOML of an executor that runs a line of Python instead of training."""
    args = json.dumps(["-c", code])
    return f'\n[[executors]]\nclass = "train"\nname = "{name}"\nruntime = "process"\n' + (
        f"cmd = {json.dumps(sys.executable)}\nargs = {args}\n"
    )


def trainer(name: str, delay: float) -> str:
    """TOML of the training executor under another name, every batch of which takes `delay` seconds longer."""
    text = executor(name, "").rpartition("args = ")[0]
    args = ["-m", "hypha.accelerate_executor.training"]
    args += ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    return f'{text}args = {json.dumps(args)}\nenv = {{ HYPHA_EXECUTOR_DELAY = "{delay}" }}\n'


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that have to do with a run directory."""
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
    """One scheduler with one job."""

    child: Child
    runs: Path

    @property
    def log(self) -> str:
        """What the scheduler has logged."""
        return self.child.log.read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of ``metrics.jsonl`` so far."""
        lines = [line for path in self.runs.glob("*/metrics.jsonl") for line in path.read_bytes().splitlines(True)]
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == kind]

    def wait_for_round(self, number: int, timeout: float = 60.0) -> None:
        """Return when a round is over; fail if the job ends before."""

        def closed() -> bool:
            assert self.child.process.poll() is None, self.log
            return len(self.events("round")) >= number

        wait_until(closed, timeout, f"round {number}")

    def wait(self, timeout: float) -> int:
        """The scheduler's exit status."""
        return self.child.process.wait(timeout)


class LocalNetwork:
    """Gateway, data node, training workers and a parameter server; `job` runs a scheduler on it."""

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
        """A node's TOML file."""
        return self.folders.configuration / f"{name}.toml"

    def extend(self, name: str, toml: str) -> None:
        """Add to a node's TOML file."""
        path = self.configuration(name)
        path.write_text(path.read_text() + toml)

    def up(self) -> None:
        """Make model and data, start every node but the scheduler, and wait until all are healthy."""
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
        """Names of all nodes but the scheduler, which lives as long as its job."""
        return [name for name in self.nodes if name != "scheduler"]

    @property
    def trainers(self) -> list[str]:
        """Names of the training workers."""
        return [name for name in self.nodes if name.startswith("worker-")]

    def start(self, name: str) -> Child:
        """Start a node from its TOML file."""
        program = self.nodes[name].program
        return self.processes.start(name, [script(program), "run", "--config", str(self.configuration(name))])

    def wait_healthy(self, *names: str) -> None:
        """Ask nodes until they say that they are healthy."""

        async def main() -> None:
            with anyio.fail_after(60):
                await wait_until_healthy(self.identity, [self.nodes[name].address for name in names])

        anyio.run(main, backend="trio")

    def kill(self, name: str) -> None:
        """End a node with SIGKILL."""
        process = self.processes.child(name).process
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def revive(self) -> None:
        """Start again what was killed, and wait until it is healthy."""
        dead = [name for name in self.daemons if self.processes.child(name).process.poll() is not None]
        for name in dead:
            self.start(name)
        self.wait_healthy(*dead)

    def log(self, name: str) -> str:
        """What a node has logged."""
        return self.processes.child(name).log.read_text(errors="replace")

    def peer_id(self, name: str) -> str:
        """A node's peer id, from what it logged when it started."""
        found = re.search(r" is (12D3\w+), at ", self.log(name))
        assert found is not None, self.log(name)
        return found[1]

    def executors(self) -> list[psutil.Process]:
        """Processes that workers have started."""
        found = []
        for name in self.trainers:
            process = self.processes.child(name).process
            if process.poll() is None:
                found += psutil.Process(process.pid).children(recursive=True)
        return found

    def job(self, *, rounds: int, kind: str | None = None, model: str | None = None) -> Job:
        """Start a scheduler with a job of its own for all training workers.

        Args:
            kind: of the training workers' executor; by default the plan's.
            model: TOML in the place of the model's path.
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
        self.configuration(name).write_text(text)
        command = [script("hypha-scheduler"), "run", "--config", str(self.configuration(name))]
        return Job(self.processes.start(name, command), runs)

    def stranger(self, name: str) -> Child:
        """Start a worker whose certificate another authority has signed."""
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
        """End every process; exit statuses by name."""

        async def main() -> dict[str, int]:
            return await self.processes.stop()

        return anyio.run(main, backend="trio")


@contextmanager
def local_network(root: Path, workers: int = 2, **extensions: str) -> Iterator[LocalNetwork]:
    """A network that is up; at the end no process of it is left.

    Args:
        extensions: TOML added to a node's file, by its name with an underscore for the dash.
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
