"""A network of real processes for benchmarks of whole jobs: gateway, data node, workers and a scheduler."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from benchmarks.children import start_child
from benchmarks.programs.delayed_links import BEHIND, FRONT
from hypha_local.certificates import write_certificates
from hypha_local.network_layout import Folders, NodePlan, plan_nodes
from hypha_local.nodes import wait_until_healthy
from hypha_local.processes import Processes, script

START_TIMEOUT: Final = 60.0
JOB_TIMEOUT: Final = 600.0
"""Seconds for one job."""


@dataclass(frozen=True)
class JobNetwork:
    """A running network."""

    folders: Folders
    processes: Processes
    programs: Mapping[str, str]
    """Console script of each node."""
    identity: Path
    addresses: Mapping[str, str]
    """Address of each node."""

    def start_nodes(self, *names: str) -> None:
        """Start nodes from their TOML files and wait until they are healthy."""
        for name in names:
            path = self.folders.configuration / f"{name}.toml"
            self.processes.start(name, [script(self.programs[name]), "run", "--config", str(path)])

        async def until_healthy() -> None:
            with anyio.fail_after(START_TIMEOUT):
                await wait_until_healthy(self.identity, [self.addresses[name] for name in names])

        anyio.run(until_healthy, backend="trio")

    def kill(self, name: str) -> None:
        """Kill a node."""
        process = self.processes.child(name).process
        process.kill()
        process.wait(START_TIMEOUT)

    def start(self, job: Mapping[str, Any]) -> tuple[subprocess.Popen[str], Path]:
        """Submit a job; return the command, which ends with the job, and the job's directory."""
        path = self.folders.root / "job.json"
        path.write_text(json.dumps(job))
        command = [
            script("hypha-scheduler"),
            "submit",
            str(path),
            "--socket",
            str(self.folders.runs / "scheduler.sock"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the job was not accepted: {process.communicate(timeout=START_TIMEOUT)[1]}")
        return process, Path(json.loads(line)["directory"])

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run a job; return its result."""
        return self.result(*self.start(job))

    def result(self, process: subprocess.Popen[str], directory: Path) -> dict[str, Any]:
        """Wait for a job; return its result."""
        _, errors = process.communicate(timeout=JOB_TIMEOUT)
        if process.returncode != 0:
            raise RuntimeError(f"the job failed: {errors}")
        found: dict[str, Any] = json.loads((directory / "result.json").read_text())
        return found


@contextmanager
def job_network(
    worker: str | Sequence[str], *, workers: int = 1, data: str | None = None, delay: float = 0.0
) -> Iterator[JobNetwork]:
    """Run a healthy network in a folder of its own; its processes and files are gone at the end.

    The folder is one of the system's temporary ones: paths of sockets are to be short.

    Args:
        worker: TOML of each worker, or a text for each.
        workers: number of workers, if they all have the same text.
        data: TOML of the data node; none is started without it. Paths are relative to a folder in `root`.
        delay: seconds that every byte between two nodes takes, in each direction; 0 for direct connections.
    """
    root = Path(tempfile.mkdtemp(prefix="hypha-"))
    folders = Folders(root)
    folders.make()
    texts = [worker] * workers if isinstance(worker, str) else worker
    nodes = {node.name: node for node in plan_nodes(len(texts))}
    identity = write_certificates(folders.certificates, nodes.values())
    own = {"gateway": 'state_dir = "../work"\n', "scheduler": 'output_dir = "../runs"\n'}
    own |= {f"worker-{number}": f'work_dir = "../work/{number}"\n{text}' for number, text in enumerate(texts, 1)}
    own |= {} if data is None else {"data": data}
    processes = Processes(folders.logs)
    programs = {name: node.program for name, node in nodes.items()}
    addresses = {name: node.address for name, node in nodes.items()}
    network = JobNetwork(folders, processes, programs, identity, addresses)
    try:
        for name, settings in own.items():
            common = _network_settings(nodes[name], nodes["gateway"], delayed=delay > 0)
            path = folders.configuration / f"{name}.toml"
            path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in common.items()) + settings)
        with _links(nodes.values(), delay):
            network.start_nodes(*own)
            yield network
    finally:
        anyio.run(processes.stop, backend="trio")
        shutil.rmtree(root)


def _network_settings(node: NodePlan, gateway: NodePlan, *, delayed: bool) -> dict[str, Any]:
    """Return the settings that every node has; delayed ones are reached through `delayed_links` only."""
    settings: dict[str, Any] = {f"{kind}_pem": f"../certs/{node.name}-{kind}.pem" for kind in ("cert", "key", "trust")}
    settings |= {"listen_addresses": [node.address], "exclude_cidr": [f"{BEHIND}/32"] if delayed else []}
    if delayed:
        settings["external_addresses"] = [_front(node)]
    settings["gateway_addresses"] = [] if node is gateway else [_front(gateway) if delayed else gateway.address]
    return settings


def _front(node: NodePlan) -> str:
    return node.address.replace(BEHIND, FRONT)


def _links(nodes: Iterable[NodePlan], delay: float) -> AbstractContextManager[object]:
    if delay <= 0:
        return nullcontext()
    return start_child("delayed_links", delay=delay, ports=[node.port for node in nodes])
