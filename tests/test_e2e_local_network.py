"""`hypha-local up` as its user sees it: a network that takes jobs, ends on a signal, and finds its jobs again."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.local_network import processes_of
from support.process_ready import accept_interrupts
from support.waiting import wait_until

from hypha_local.processes import child_environment, script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]

ROUNDS = 2


class Up:
    """A running network."""

    def __init__(self, place: Path, *options: str) -> None:
        command = [script("hypha-local"), "up", *options]
        self.place = place
        self.errors = place / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=place,
                env=child_environment(os.environ),
                preexec_fn=accept_interrupts,
            )

    def printed_commands(self) -> list[str]:
        """Return the commands that it prints when every node is healthy."""
        assert self.process.stdout is not None
        lines = []
        while line := self.process.stdout.readline():
            lines.append(line.partition(":")[2].strip())
            if lines[-1] == "Ctrl-C":
                return lines
        raise AssertionError(self.errors.read_text())

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode

    def run(self, command: str, *more: str) -> str:
        """Run one of the printed commands."""
        program, *words = shlex.split(command)
        done = subprocess.run(
            [script(program), *words, *more],
            cwd=self.place,
            env=child_environment(os.environ),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def up(place: Path, *options: str) -> Iterator[Up]:
    started = Up(place, *options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGTERM)  # it ends its processes


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a folder whose path is short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="hypha-up-") as folder:
        yield Path(folder)


def test_a_network_takes_jobs_and_finds_them_at_its_next_start(place: Path) -> None:
    folder = place / "hypha-network"
    with up(place) as network:
        submit, jobs, _ = network.printed_commands()
        again = subprocess.run(
            [script("hypha-local"), "up", "--dir", str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (again.returncode, again.stdout) == (1, "")
        assert "its network runs already; end it first" in again.stderr
        job = (folder / "job.toml").read_text()
        assert "update_rounds = 16\n" in job
        (folder / "job.toml").write_text(job.replace("update_rounds = 16\n", f"update_rounds = {ROUNDS}\n"))
        result = json.loads(network.run(submit).splitlines()[-1])["result"]
        assert json.loads(Path(result).read_text())["rounds"] == ROUNDS
        assert network.end(signal.SIGINT) == 130
    assert processes_of(folder) == []

    mine = Path(shutil.copytree(folder / "data" / "digits", place / "mine"))
    began = time.time()
    with up(place, "--data", str(mine)) as network:
        assert network.printed_commands() == [submit, jobs, "Ctrl-C"]
        [found] = map(json.loads, network.run(jobs, "--all", "--format", "json").splitlines())
        assert (found["state"], str(Path(result).parent)) == ("finished", found["directory"])
        served = network.run(f"hypha-data list --config {folder / 'config' / 'data.toml'}")
        assert {line.split()[0] for line in served.splitlines()[1:]} == {"digits", "held-out", "mine"}
        assert (folder / "certs" / "worker-1-cert.pem").stat().st_mtime < began, "its certificates last"
        assert "worker-2 has ended" not in network.errors.read_text()
        network.run(f"hypha-worker drain --config {folder / 'config' / 'worker-2.toml'}")
        wait_until(lambda: "worker-2 has ended; the network goes on" in network.errors.read_text(), 60, "its end")
        assert "finished" in network.run(jobs, "--all")
        assert network.end(signal.SIGTERM) == 0
    assert processes_of(folder) == []
