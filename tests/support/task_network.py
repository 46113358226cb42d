"""A network of real processes on which jobs of tasks run: gateway, data node, workers, and a scheduler that takes jobs.

The workers' executors run Python: ``shell/python`` the code in the task's setting ``code``, ``shell/pass`` nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypha_local.processes import LocalProcess, script
from support.local_network import LocalNetwork, running
from support.waiting import wait_until

RUN_CODE = "import json; task = json.load(open('job.json')); exec(task['settings'].get('code', 'pass'))"
"""What ``shell/python`` runs; the code finds its task in `task`."""


def executor(name: str, *args: str, writable: Sequence[Path] = ()) -> str:
    """Return TOML of an executor of the class ``shell`` that runs Python with these arguments."""
    table = f'\n[[executors]]\nclass = "shell"\nname = "{name}"\nruntime = "process"\n'
    table += f"writable = {json.dumps([str(path) for path in writable])}\n"
    return f"{table}cmd = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\n"


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted job."""

    process: subprocess.Popen[str]
    runs: Path
    job_id: str

    @property
    def directory(self) -> Path:
        """The job's directory."""
        return self.runs / self.job_id

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the journal's records of a kind so far."""
        return self._lines("journal.jsonl", "record", kind)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        return self._lines("metrics.jsonl", "event", kind)

    def _lines(self, name: str, key: str, kind: str) -> list[dict[str, Any]]:
        path = self.directory / name
        lines = path.read_bytes().splitlines(True) if path.exists() else []
        return [found for line in lines if line.endswith(b"\n") and (found := json.loads(line))[key] == kind]

    def finished(self) -> list[str]:
        """Return the names of the tasks whose outputs the journal has, in the order of their ends.

        These are what a resumed job does not run again. The record ``ended`` comes before: what has only that one when
        the scheduler is killed runs again.
        """
        return [record["task"] for record in self.records("task_finished")]

    def wait_for_finished(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many tasks have finished; fail if the job ends first."""

        def enough() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(self.finished()) >= count

        wait_until(enough, timeout, f"{count} finished tasks")

    def wait(self, timeout: float) -> dict[str, Any]:
        """Wait for success; return the job's result."""
        _, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, errors
        return dict(json.loads((self.directory / "result.json").read_text()))

    def wait_for_failure(self, timeout: float) -> str:
        """Wait for failure; return what the command says."""
        _, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 1, errors
        return errors


class TaskNetwork(LocalNetwork):
    """A local network without training."""

    def __init__(self, root: Path, workers: int, leases: int) -> None:
        """Plan the network, with workers that can each run `leases` tasks at once."""
        super().__init__(root, workers)
        self.shared = root / "shared"
        """File system that the workers' owners allow jobs to read."""
        self.shared.mkdir()
        self.written = root / "written"
        """Folder that tasks of ``shell/python`` may change, besides their own."""
        self.written.mkdir()
        for name in self.trainers:
            text, _, _ = self.configuration(name).read_text().partition("[resources]")
            text = text.replace("drain_timeout = 0", "drain_timeout = 30")
            resources = f"[resources]\ncpu = {leases}\nmemory = 4\nstorage = 20\n"
            resources += "[resources.default]\ncpu = 1\nstorage = 1\n"
            roots = f"[connectors]\nroots = {json.dumps([str(self.shared)])}\n"
            code = executor("python", "-c", RUN_CODE, writable=[self.written]) + executor("pass", "-c", "pass")
            self.configuration(name).write_text(f"{text}{resources}{roots}{code}")
        scheduler, _, _ = self.configuration("scheduler").read_text().partition("output_dir")
        self.configuration("scheduler").write_text(f'{scheduler}output_dir = "../runs"\n')
        data, _, _ = self.configuration("data").read_text().partition("[[datasets]]")
        self.configuration("data").write_text(f'{data}[[datasets]]\nname = "numbers"\npath = "../data/numbers"\n')

    @property
    def daemons(self) -> list[str]:
        """Return the names of all nodes but the parameter server."""
        return [name for name in self.nodes if name != "parameter-server"]

    def up(self) -> None:
        """Create a dataset, start every node, and wait until all are healthy."""
        self._write_dataset()
        for name in self.daemons:
            self.start(name)
        self.wait_healthy(*self.daemons)

    def _write_dataset(self) -> None:
        import numpy
        from safetensors.numpy import save_file

        source = self.folders.data / "numbers.safetensors"
        save_file({"number": numpy.arange(12, dtype=numpy.int64)}, source)
        self._run("hypha-data", "prepare", str(source), "--out", str(self.folders.data / "numbers"), "--slices", "3")

    def submit(self, job: Mapping[str, Any] | Sequence[Any]) -> Submission:
        """Submit a job of tasks; return when it is accepted."""
        path = self.folders.root / f"job-{time.monotonic_ns()}.json"
        path.write_text(json.dumps(job))
        process = self._start_command("submit", str(path), "--socket", str(self.folders.runs / "scheduler.sock"))
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        return Submission(process, self.folders.runs, json.loads(line)["job_id"])

    def resume(self, job: Submission) -> Submission:
        """Resume a job: by the scheduler if it runs, otherwise by a scheduler of its own."""
        config = str(self.configuration("scheduler"))
        return replace(job, process=self._start_command("resume", str(job.directory), "--config", config))

    @staticmethod
    def _start_command(*words: str) -> subprocess.Popen[str]:
        command = [script("hypha-scheduler"), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)

    def worker_of(self, peer: str) -> str:
        """Return the name of the worker with a peer id."""
        return next(name for name in self.trainers if self.peer_id(name) == peer)

    def stop_child(self, child: LocalProcess) -> int:
        """Ask a process to end (SIGTERM); return its exit status."""
        child.process.terminate()
        return child.process.wait(60)


@contextmanager
def task_network(root: Path, workers: int = 2, leases: int = 1) -> Iterator[TaskNetwork]:
    """Run a healthy network; at the end none of its processes is left."""
    with running(TaskNetwork(root, workers, leases)) as network:
        yield network
