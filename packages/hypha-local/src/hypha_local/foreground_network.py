"""A network of this machine's own that runs in the foreground and takes jobs, until a signal ends it.

Unlike the demo's, its directory lasts: a later start uses its certificates, datasets, jobs and results again. Uses
`network_layout` for the files and `nodes` to start the programs.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from cryptography.x509 import load_pem_x509_certificate
from rich.console import Console

from hypha_certutil.storage import names_in
from hypha_local.certificates import OWN_NAME, write_certificates
from hypha_local.demo import make_data, make_model
from hypha_local.demo_tasks import DIGITS
from hypha_local.display import Display
from hypha_local.errors import DatasetUnusableError, RunDirectoryError
from hypha_local.executor_session import ExecutorSession
from hypha_local.inference_demo import MODULE as INFERENCE_MODULE
from hypha_local.network_layout import (
    AGGREGATION,
    HELD_OUT,
    PARAMETER_SERVER,
    DemoTraining,
    Folders,
    NodePlan,
    job_table,
    plan_nodes,
    process_executor,
    training_executor,
    write_nodes,
)
from hypha_local.nodes import start_node, wait_for_health
from hypha_local.processes import Processes, local_processes

MARKER: Final = ".hypha-network"
"""File that tells the directory of such a network, and is locked while it runs."""
JOB: Final = "job.toml"
"""Name of the example job's file."""
MANIFEST: Final = "manifest.json"
"""File that makes a folder a dataset."""
_RENEWED: Final = timedelta(days=2)
"""Certificates that end sooner are replaced at the start."""


@dataclass(frozen=True, slots=True)
class ForegroundNetwork:
    """What is started."""

    folders: Folders
    workers: int
    """Number of workers, without the parameter server."""
    datasets: Mapping[str, Path]
    """Folders of prepared datasets that are served beside those in the network's directory, by name."""

    @property
    def example(self) -> DemoTraining:
        """The example job's parameters."""
        return DemoTraining(self.workers, evaluate_every=DIGITS.evaluate_every)

    @property
    def job_file(self) -> Path:
        """File of the example job."""
        return self.folders.root / JOB

    @property
    def scheduler_file(self) -> Path:
        """Configuration of the scheduler, by which commands find it."""
        return self.folders.configuration / "scheduler.toml"


def named_datasets(values: Sequence[str]) -> dict[str, Path]:
    """Return the folders of datasets that are given as ``FOLDER`` or ``NAME=FOLDER``, by name.

    Raises:
        DatasetUnusableError: a folder has no manifest, or two datasets have one name.
    """
    found: dict[str, Path] = {}
    for value in values:
        name, sign, place = value.partition("=")
        folder = Path(place if sign else value).resolve()
        name = name if sign else folder.name
        if not name or name in found:
            state = "taken" if name else "empty"
            raise DatasetUnusableError(f"--data {value}: the name {name!r} is {state}; write NAME=FOLDER with another")
        if not (folder / MANIFEST).is_file():
            raise DatasetUnusableError(
                f"--data {value}: {folder} has no {MANIFEST}; write one with hypha-data prepare SOURCE --out FOLDER"
            )
        found[name] = folder
    return found


async def run_network(network: ForegroundNetwork, console: Console, ready: Callable[[], None]) -> None:
    """Run the network until this task is cancelled.

    Args:
        network: what to start.
        console: terminal for the progress.
        ready: called when every node is healthy.

    Raises:
        RunDirectoryError: the directory cannot be used, or the network runs already.
        DatasetUnusableError: a dataset has the name of another.
        ProcessFailedError: a program failed, or has ended; the message ends with its last lines.
    """
    display, folders = Display(console, 0), network.folders
    with _directory(folders):
        nodes = plan_nodes(network.workers)
        if not _has_certificates(folders, nodes):
            await anyio.to_thread.run_sync(write_certificates, folders.certificates, nodes)
            display.step(f"certificates for {len(nodes)} nodes in {folders.certificates}")
        async with local_processes(folders.logs) as processes:
            await _make_example(processes, network, display)
            _write_configuration(network, nodes)
            for node in nodes:
                start_node(processes, folders, node)
            try:
                await wait_for_health(processes, folders.certificates / OWN_NAME, nodes)
                display.step(f"{len(nodes)} nodes up and healthy: " + ", ".join(node.name for node in nodes))
                ready()
                await _watch(processes, nodes, display)
            finally:
                # before its workers, so that jobs which run are interrupted and lose none of them
                with anyio.CancelScope(shield=True):
                    await processes.stop(["scheduler"])


async def _watch(processes: Processes, nodes: Sequence[NodePlan], display: Display) -> None:
    """Wait until a node fails; workers may end, as when they are drained.

    Raises:
        ProcessFailedError: a node has failed, or another than a worker has ended.
    """
    running, workers = [node.name for node in nodes], [node.name for node in nodes if node.role == "worker"]
    while True:
        ended = await processes.watch(running, workers)
        running.remove(ended)
        display.step(f"{ended} has ended; the network goes on without it until its next start")


@contextmanager
def _directory(folders: Folders) -> Iterator[None]:
    """Make the network's directory if there is none, and lock it for the time of the context.

    Raises:
        RunDirectoryError: it holds something else, or the network runs already.
    """
    root = folders.root
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / MARKER).is_file())):
        raise RunDirectoryError(f"--dir {root}: not empty and not a network's directory; name another folder")
    folders.make_parts()
    with (root / MARKER).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"--dir {root}: its network runs already; end it first, or name another") from None
        if file.tell() == 0:
            file.write("Directory of a network of hypha-local up, which uses it again at its next start.\n")
            file.flush()
        yield


def _has_certificates(folders: Folders, nodes: Sequence[NodePlan]) -> bool:
    """Return whether every node, and this process, has certificates for some time; all are of one authority."""
    names = [names_in(folders.certificates, name) for name in (*(node.name for node in nodes), OWN_NAME)]
    if not all(path.is_file() for name in names for path in (name.certificate, name.key, name.trust)):
        return False
    ends = [load_pem_x509_certificate(name.certificate.read_bytes()).not_valid_after_utc for name in names]
    return min(ends) - datetime.now(UTC) > _RENEWED


async def _make_example(processes: Processes, network: ForegroundNetwork, display: Display) -> None:
    """Make dataset, start model and file of the example job, unless an earlier start has."""
    folders, training = network.folders, network.example
    if network.job_file.exists():
        return
    for folder in (folders.start_model, folders.data / training.task.name, folders.data / HELD_OUT):
        shutil.rmtree(folder, ignore_errors=True)
    session = ExecutorSession(processes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(make_model, session, folders, training)
        tasks.start_soon(make_data, processes, folders, training)
    await processes.stop(["models"])
    network.job_file.write_text(job_table(training, folders.start_model.name), encoding="utf-8")
    display.step(f"example job {network.job_file}, with its start model and its dataset {training.task.name}")


def _write_configuration(network: ForegroundNetwork, nodes: Sequence[NodePlan]) -> None:
    """Write the TOML file of every node, whose ports are new at every start."""
    inference = process_executor("inference", "transformers", sys.executable, INFERENCE_MODULE)
    others = training_executor(sys.executable) + inference

    def executors(node: NodePlan) -> str:
        return AGGREGATION if node.name == PARAMETER_SERVER else others

    datasets = {name: str(path) for name, path in _datasets(network).items()}
    write_nodes(network.folders, nodes, datasets, executors, work=str(network.folders.work))


def _datasets(network: ForegroundNetwork) -> dict[str, Path]:
    """Return the folders of all datasets: those in the network's directory, and those that were named."""
    own = {path.parent.name: path.parent for path in sorted(network.folders.data.glob(f"*/{MANIFEST}"))}
    if twice := sorted(name for name in own.keys() & network.datasets.keys() if own[name] != network.datasets[name]):
        raise DatasetUnusableError(f"--data: {network.folders.data} has a dataset {twice[0]} too; write NAME=FOLDER")
    return own | dict(network.datasets)
