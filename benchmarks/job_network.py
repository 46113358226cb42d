"""A network of real processes for benchmarks of whole jobs: gateway, data node, workers and a scheduler."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from hypha_local.certificates import write_certificates
from hypha_local.network_layout import Folders, plan_nodes
from hypha_local.probe import wait_until_healthy
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
def job_network(worker: str, *, workers: int = 1, data: str | None = None) -> Iterator[JobNetwork]:
    """Run a healthy network in a folder of its own; its processes and files are gone at the end.

    The folder is one of the system's temporary ones: paths of sockets are to be short.

    Args:
        worker: TOML of each worker.
        data: TOML of the data node; none is started without it. Paths are relative to a folder in `root`.
    """
    root = Path(tempfile.mkdtemp(prefix="hypha-"))
    folders = Folders(root)
    folders.make()
    nodes = {node.name: node for node in plan_nodes(workers)}
    identity = write_certificates(folders.certificates, nodes.values())
    own = {"gateway": 'state_dir = "../work"\n', "scheduler": 'output_dir = "../runs"\n'}
    own |= {f"worker-{number}": f'work_dir = "../work/{number}"\n{worker}' for number in range(1, workers + 1)}
    own |= {} if data is None else {"data": data}
    gateway = nodes["gateway"].address
    processes = Processes(folders.logs)
    programs = {name: node.program for name, node in nodes.items()}
    addresses = {name: node.address for name, node in nodes.items()}
    network = JobNetwork(folders, processes, programs, identity, addresses)
    try:
        for name, settings in own.items():
            common: dict[str, Any] = {f"{kind}_pem": f"../certs/{name}-{kind}.pem" for kind in ("cert", "key", "trust")}
            common |= {"listen_addresses": [addresses[name]], "exclude_cidr": []}
            common["gateway_addresses"] = [] if name == "gateway" else [gateway]
            path = folders.configuration / f"{name}.toml"
            path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in common.items()) + settings)
        network.start_nodes(*own)
        yield network
    finally:
        anyio.run(processes.stop, backend="trio")
        shutil.rmtree(root)
