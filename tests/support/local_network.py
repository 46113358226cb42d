"""A network of real processes for tests, configured by TOML files, on which jobs run one after the other.

Built on the modules of hypha_local in the order of its demo: layout, certificates, processes, probe.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import anyio
import psutil

from hypha_local.certificates import write_certificates
from hypha_local.datasets.digits import write_digits
from hypha_local.demo_tasks import DIGITS
from hypha_local.network_layout import DemoTraining, Folders, NodePlan, free_ports, plan_nodes, write_configuration
from hypha_local.nodes import wait_until_healthy
from hypha_local.processes import LocalProcess, Processes, script
from support.waiting import wait_until

KIND = 'kind = "diloco-transformer"'
"""The executor that the planned job asks of its training workers."""
TYPE = 'type = "diloco"\n'
"""First line of the planned job."""
MODEL = 'path = "../start-model"'
"""Where the job starts in the planned scheduler configuration."""
DATASET = 'dataset = "digits"'
"""What it trains on."""


def _replaced(text: str, changes: Mapping[str, str]) -> str:
    """Return text with parts replaced, each of which must be there."""
    for old, new in changes.items():
        assert old in text, text
        text = text.replace(old, new)
    return text


def _is_fork_server(process: psutil.Process) -> bool:
    """Return whether a process is the one by which a worker starts others; it lives as long as the worker."""
    try:
        return any(word.endswith("fork_server.py") for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


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

    child: LocalProcess
    runs: Path

    @property
    def name(self) -> str:
        """Return the name of its configuration."""
        return self.child.name

    @property
    def log(self) -> str:
        """Return the scheduler's log."""
        return self.child.log.read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind in ``metrics.jsonl`` so far."""
        lines = [line for path in self.runs.glob("*/metrics.jsonl") for line in path.read_bytes().splitlines(True)]
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == kind]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind in ``journal.jsonl`` so far, oldest first."""
        lines = [line for path in self.runs.glob("*/journal.jsonl") for line in path.read_bytes().splitlines(True)]
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record for record in records if record["record"] == kind]

    @property
    def directory(self) -> Path:
        """Return the job's directory."""
        [journal] = self.runs.glob("*/journal.jsonl")
        return journal.parent

    def wait_for(self, happened: Callable[[], bool], what: str, timeout: float = 60.0) -> float:
        """Wait until something has happened; fail if the job ends first. Return the seconds that it took."""

        def has_happened() -> bool:
            if happened():
                return True
            assert self.child.process.poll() is None, f"the job ended before {what}:\n{self.log}"
            return False

        return wait_until(has_happened, timeout, what)

    def wait_for_event(self, kind: str, after: float = 0.0, timeout: float = 60.0, **fields: object) -> dict[str, Any]:
        """Wait for an event with these fields at a time after `after`, seconds since the epoch; return the first."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [
                event
                for event in self.events(kind)
                if event["time"] >= after and all(event.get(key) == value for key, value in fields.items())
            ]
            return bool(found)

        self.wait_for(is_there, f"the event {kind} {fields or ''}", timeout)
        return found[0]

    def wait_for_round(self, number: int, timeout: float = 60.0) -> None:
        """Wait until a round is closed; fail if the job ends first."""
        self.wait_for(lambda: len(self.events("round")) >= number, f"round {number}", timeout)

    def wait(self, timeout: float) -> int:
        """Wait for the scheduler; return its exit status."""
        return self.child.process.wait(timeout)


class LocalNetwork:
    """Gateway, data node, training workers and a parameter server; `job` starts a scheduler."""

    def __init__(self, root: Path, workers: int, twins: Mapping[str, str] | None = None) -> None:
        """Plan the network; nothing runs before `up`.

        Args:
            root: where its files are.
            workers: number of training workers.
            twins: names of further nodes, each with the node whose configuration it gets.
        """
        self.folders = Folders(root)
        self.folders.make()
        self.nodes = {node.name: node for node in plan_nodes(workers)}
        twins = twins or {}
        for (name, original), port in zip(twins.items(), free_ports(len(twins)), strict=True):
            self.nodes[name] = replace(self.nodes[original], name=name, port=port)
        self.processes = Processes(self.folders.logs)
        self.identity = write_certificates(self.folders.certificates, self.nodes.values())
        self._jobs = 0
        self._started: list[Job] = []
        planned = [node for name, node in self.nodes.items() if name not in twins]
        write_configuration(self.folders, planned, DemoTraining(workers=workers), sys.executable)
        for name, original in twins.items():
            self._write_twin(name, original)

    def _write_twin(self, name: str, original: str) -> None:
        """Write the configuration of a node that differs from another's by its identity, address and folder."""
        text, nodes = self.configuration(original).read_text(), self.nodes
        text = text.replace(f"../certs/{original}-", f"../certs/{name}-")
        text = text.replace(nodes[original].address, nodes[name].address)
        self.configuration(name).write_text(text.replace(f'"../work/{original}"', f'"../work/{name}"'))

    def configuration(self, name: str) -> Path:
        """Return the path of a node's TOML file."""
        return self.folders.configuration / f"{name}.toml"

    def extend(self, name: str, toml: str) -> None:
        """Append to a node's TOML file."""
        path = self.configuration(name)
        path.write_text(path.read_text() + toml)

    def set_drain_timeout(self, name: str, seconds: int) -> None:
        """Let a worker that gets SIGTERM wait for its job so long; by default not at all."""
        path = self.configuration(name)
        path.write_text(_replaced(path.read_text(), {"drain_timeout = 0": f"drain_timeout = {seconds}"}))

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

    def start(self, name: str) -> LocalProcess:
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
        process.wait(60)

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

    def executors(self, *names: str) -> list[psutil.Process]:
        """Return the processes that workers, by default all, have started, those of their sandboxes included."""
        found = []
        for name in names or self.trainers:
            process = self.processes.child(name).process
            if process.poll() is None:
                worker = psutil.Process(process.pid)
                servers = {child.pid for child in worker.children() if _is_fork_server(child)}
                found += [child for child in worker.children(recursive=True) if child.pid not in servers]
        return found

    def check_quiet(self) -> None:
        """Wait for the end of all executors, and check that no node has logged a traceback."""
        wait_until(lambda: not self.executors(), 60, "the end of all executors")
        for name in self.daemons:
            assert "Traceback" not in self.log(name), self.log(name)

    def commands(self, *names: str) -> list[psutil.Process]:
        """Return the innermost of `executors`: the configured commands, if these have started no processes."""
        parents = {}
        for process in self.executors(*names):
            with suppress(psutil.NoSuchProcess):
                parents[process] = process.ppid()
        return [process for process in parents if process.pid not in parents.values()]

    def job(
        self,
        *,
        rounds: int,
        kind: str | None = None,
        model: str | None = None,
        dataset: str | None = None,
        workers: int | None = None,
        min_workers: int | None = None,
        settings: str = "",
        resources: str = "",
    ) -> Job:
        """Start a scheduler with a new job.

        Args:
            rounds: number of its rounds.
            kind: name of the training workers' executor; by default the plan's.
            model: TOML that replaces the model's path.
            dataset: TOML that replaces the dataset's name.
            workers: training workers; by default all of the network.
            min_workers: training workers without which the job pauses; by default all.
            settings: TOML of further keys of the job itself.
            resources: TOML of further keys of its table ``resources``.
        """
        self._jobs += 1
        name = f"job-{self._jobs}"
        workers = len(self.trainers) if workers is None else workers
        training = DemoTraining(workers=workers, rounds=rounds)
        some = [self.nodes["gateway"], self.nodes["scheduler"]]
        write_configuration(self.folders, some, training, sys.executable)
        runs = self.folders.runs / name
        runs.mkdir()
        count = f"num_workers = {workers}\n"
        text = _replaced(
            self.configuration("scheduler").read_text(),
            {
                '"../runs"': json.dumps(f"../runs/{name}"),
                KIND: KIND if kind is None else f'kind = "{kind}"',
                MODEL: model or MODEL,
                DATASET: dataset or DATASET,
                count: f"{count}min_workers = {min_workers or workers}\n{resources}",
                TYPE: f"{TYPE}{settings}",
            },
        )
        self.configuration(name).write_text(text)
        return self.restart(name)

    def train(
        self,
        dataset: str,
        model: Path,
        kind: str,
        inputs: Sequence[str] = (),
        evaluation: str = "",
        tables: str = "",
        **settings: int,
    ) -> Job:
        """Run a job on another dataset and model to its end.

        Args:
            dataset: name of the dataset, and of the job.
            model: its directory.
            kind: type of the model.
            inputs: its `input_names`.
            evaluation: name of the dataset to evaluate on.
            tables: TOML of further tables of the job.
            settings: keys of the job's table ``rounds``.
        """
        runs = self.folders.runs / dataset
        runs.mkdir()
        named = f'dataset = "{dataset}"' + (f'\nevaluation = "{evaluation}"' if evaluation else "")
        text = _replaced(
            self.configuration("scheduler").read_text(),
            {
                '"../runs"': f'"../runs/{dataset}"',
                DATASET: named,
                MODEL: f"path = {json.dumps(str(model))}\ninput_names = {json.dumps(inputs)}",
                'type = "vision-classification"': f'type = "{kind}"',
            },
        )
        for key, value in settings.items():
            text, found = re.subn(rf"^{key} = \d+$", f"{key} = {value}", text, flags=re.MULTILINE)
            assert found == 1, text
        self.configuration(dataset).write_text(f"{text}\n{tables}")
        job = self.restart(dataset)
        assert job.wait(150) == 0, job.log
        return job

    def restart(self, name: str) -> Job:
        """Start a scheduler with the configuration of a job, whose earlier one has ended; `name` is `Job.name`."""
        command = [script("hypha-scheduler"), "run", "--config", str(self.configuration(name))]
        self._started.append(Job(self.processes.start(name, command), self.folders.runs / name))
        return self._started[-1]

    def stop_jobs(self) -> None:
        """End the schedulers that a failed test has left, so that its workers are free for the next one."""
        for job in self._started:
            if job.child.process.poll() is None:
                job.child.process.send_signal(signal.SIGINT)
                job.child.process.wait(60)
        self._started.clear()

    def scheduler_command(self, job: Job, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the scheduler on the directory of a job."""
        words = [script("hypha-scheduler"), command, str(job.directory), *args]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    def start_untrusted_worker(self, name: str) -> LocalProcess:
        """Start a worker whose certificate is signed by another authority."""
        [node] = [node for node in plan_nodes(1) if node.name == "worker-1"]
        stranger = NodePlan(name, node.program, node.role, node.port)
        folder = self.folders.root / "other-authority"
        folder.mkdir()
        write_certificates(folder, [stranger])
        write_configuration(self.folders, [self.nodes["gateway"], stranger], DemoTraining(), sys.executable)
        path = self.configuration(name)
        path.write_text(path.read_text().replace("../certs/", "../other-authority/"))
        return self.processes.start(name, [script(stranger.program), "run", "--config", str(path)])

    def down(self) -> dict[str, int]:
        """Stop every process; return exit statuses by name."""
        return anyio.run(self.processes.stop, backend="trio")


Network = TypeVar("Network", bound=LocalNetwork)


@contextmanager
def running(network: Network) -> Iterator[Network]:
    """Run a network that is planned, until it is healthy; at the end none of its processes is left."""
    try:
        network.up()
        yield network
    finally:
        network.down()
    assert processes_of(network.folders.root) == []


@contextmanager
def local_network(
    root: Path, workers: int = 2, twins: Mapping[str, str] | None = None, drain_timeout: int = 0, **extensions: str
) -> Iterator[LocalNetwork]:
    """Run a healthy network; at the end none of its processes is left.

    Args:
        root: where its files are.
        workers: number of training workers.
        twins: see `LocalNetwork`.
        drain_timeout: seconds for which a training worker that gets SIGTERM waits for its job.
        extensions: TOML appended to a node's file, by node name with underscores for dashes.
    """
    network = LocalNetwork(root, workers, twins)
    for name in network.trainers:
        network.set_drain_timeout(name, drain_timeout)
    for name, toml in extensions.items():
        network.extend(name.replace("_", "-"), toml)
    with running(network):
        yield network
