"""A training job whose members come and go, beside the same job without faults.

Four workers with a numpy executor, whose batches mostly wait, train in processes of their own. In one run a fault
happens every `EVERY` seconds, by a seed: a worker is killed and started again, its executor is killed or stopped for a
while, a worker leaves by SIGTERM, or the parameter server is killed. What counts are the samples of recorded rounds.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.job_network import JobNetwork, job_network
from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_local.datasets.digits import write_digits
from hypha_local.processes import script
from tests.support.numpy_executor import executor_toml, write_model

WORKERS: Final = 4
SERVERS: Final = ("worker-5", "worker-6")
"""Nodes that take the outer steps: one at a time."""
EVERY: Final = 30.0
"""Seconds between two faults."""
AWAY: Final = 5.0
"""Seconds after which what was killed is started again."""
STOPPED: Final = 15.0
"""Seconds for which an executor stands still."""
DELAY: Final = 0.1
"""Seconds that each batch takes longer than its computation, so that processes do not compete for cores."""
BATCH: Final = 16
STEPS: Final = 25
FEATURES: Final = 64
SLICES: Final = 16
ROUNDS: Final = 100_000
"""More than any run takes."""
STEADY: Final = 3
"""Rounds until speeds are measured."""
TIMEOUT: Final = 120.0
KIND: Final = "numpy"
SERVER: Final = "parameter-server"
Event = dict[str, Any]


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both runs for `run.minutes`, then rounds during which a worker joins."""
    _prepare(run.folder)
    plain = _samples(run, faults=False)
    return [
        Row(
            f"{WORKERS} workers, a fault every {EVERY:.0f} s for {run.minutes:g} min: accepted samples",
            "samples",
            found := _samples(run, faults=True),
            plain,
            "the same without faults",
            found / plain,
            ">= 0.90",
        ),
        _joiner_row(run),
    ]


def _prepare(folder: Path) -> None:
    source = folder / "digits.safetensors"
    write_digits(source, folder / "test.safetensors")
    command = [script("hypha-data"), "prepare", str(source), "--out", str(folder / "digits"), "--slices", str(SLICES)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    write_model(folder / "model", FEATURES)


@contextmanager
def _network(run: BenchmarkRun) -> Iterator[JobNetwork]:
    common = "drain_timeout = 60\n[resources]\ncpu = 1\nmemory = 1\nstorage = 2\n"
    trainer = common + executor_toml(KIND, DELAY)
    server = f'{common}\n[[executors]]\nclass = "aggregate"\nname = "{SERVER}"\nruntime = "parameter-server"\n'
    data = f'[[datasets]]\nname = "digits"\npath = {json.dumps(str(run.folder / "digits"))}\n'
    workers = [trainer] * WORKERS + [server] * len(SERVERS)
    with job_network(workers, data=data) as network:
        yield network


def _job(run: BenchmarkRun, workers: int) -> dict[str, Any]:
    price = {"bid": 100.0, "max": 120.0}
    return {
        "type": "diloco",
        "dataset": "digits",
        "model": {"path": str(run.folder / "model"), "type": "vision-classification"},
        "inner_optimizer": {"learning_rate": 0.002},
        "rounds": {
            "update_rounds": ROUNDS,
            "avg_samples_between_updates": BATCH * STEPS * workers,
            "batch_size": BATCH,
            "checkpoint_every": ROUNDS,
        },
        "resources": {
            "num_workers": workers,
            "min_workers": max(1, workers // 2),
            "max_workers": WORKERS,
            "worker": {"cpu": 1, "kind": KIND},
            "parameter_server": {"cpu": 1, "kind": SERVER},
            "worker_price": price,
            "parameter_server_price": price,
        },
    }


def _samples(run: BenchmarkRun, *, faults: bool) -> float:
    """Return the samples of the rounds that were recorded in `run.minutes` after the first round."""
    with _network(run) as network:
        process, directory = network.start(_job(run, WORKERS))
        began = _wait_for_round(process, directory, 1)["time"]
        end, injector = began + 60 * run.minutes, _Faults(network, directory)
        due = began + EVERY
        while time.time() < end:
            _check(process)
            if faults and due <= time.time() < end - EVERY / 2:
                due += EVERY
                injector.inject()
            injector.undo()
            time.sleep(0.1)
        rounds = [event for event in _events(directory, "round") if began < event["time"] <= end]
        _stop(process)
    return float(sum(event["samples"] for event in rounds))


class _Faults:
    """Injects one fault after the other, and undoes it some seconds later."""

    def __init__(self, network: JobNetwork, directory: Path) -> None:
        self._network, self._directory = network, directory
        self._random = random.Random(0)
        self._names = {f"worker-{number}" for number in range(1, WORKERS + 1)}
        self._kinds: list[Callable[[], None]] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []

    def inject(self) -> None:
        """Inject the next fault: each kind once, then each again, in an order by the seed."""
        if not self._kinds:
            self._kinds = [
                self._kill_worker,
                self._kill_executor,
                self._stop_executor,
                self._leave,
                self._kill_server,
            ]
            self._random.shuffle(self._kinds)
        fault = self._kinds.pop()
        name = fault.__name__.strip("_").replace("_", " ")
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        fault()

    def undo(self) -> None:
        """Undo what is due."""
        due = [undo for at, undo in self._undo if at <= time.time()]
        self._undo = [(at, undo) for at, undo in self._undo if at > time.time()]
        for undo in due:
            undo()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.time() + seconds, undo))

    def _kill_worker(self) -> None:
        name = self._any_worker()
        self._network.kill(name)
        self._later(AWAY, lambda: self._network.start_nodes(name))

    def _leave(self) -> None:
        name = self._any_worker()
        process = self._network.processes.child(name).process
        process.terminate()

        def start_again() -> None:
            if process.poll() is None:
                self._later(AWAY, start_again)
            else:
                self._network.start_nodes(name)

        self._later(AWAY, start_again)

    def _kill_executor(self) -> None:
        for process in self._executors(self._any_worker()):
            process.kill()

    def _stop_executor(self) -> None:
        stopped = self._executors(self._any_worker())
        for process in stopped:
            process.suspend()

        def resume() -> None:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

        self._later(STOPPED, resume)

    def _kill_server(self) -> None:
        terms = [record for record in _lines(self._directory / "journal.jsonl") if record["record"] == "term"]
        [name] = [name for name in SERVERS if self._peer(name) == terms[-1]["server"]]
        self._network.kill(name)
        self._later(AWAY, lambda: self._network.start_nodes(name))

    def _any_worker(self) -> str:
        running = [name for name in self._names if self._executors(name)]
        return self._random.choice(sorted(running or self._names))

    def _executors(self, name: str) -> list[psutil.Process]:
        process = self._network.processes.child(name).process
        if process.poll() is not None:
            return []
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(word.endswith("numpy_executor.py") for word in child.cmdline()[:2]):
                    found.append(child)
        return found

    def _peer(self, name: str) -> str:
        text = self._network.processes.child(name).log.read_text(errors="replace")
        found: list[str] = re.findall(r" is (12D3\w+), at ", text)
        return found[-1]


def _joiner_row(run: BenchmarkRun) -> Row:
    """Compare rounds during which a worker prepares with those before it was started; the last of `run.repeat`."""
    before, during = [], []
    with _network(run) as network:
        network.kill(f"worker-{WORKERS}")
        process, directory = network.start(_job(run, WORKERS - 1))
        for _ in range(run.repeat):
            first = len(_events(directory, "round"))
            _wait_for_round(process, directory, first + 2 * STEADY)
            began = time.time()
            network.start_nodes(f"worker-{WORKERS}")
            joined = _wait_for(process, partial(_joined_after, directory, began))
            _wait_for_round(process, directory, joined["round"])
            rounds = _events(directory, "round")
            before += [event["seconds"] for event in rounds[-2 * STEADY :] if event["time"] < began]
            during += [
                event["seconds"] for event in rounds if began < event["time"] and event["round"] < joined["round"]
            ]
            network.kill(f"worker-{WORKERS}")
            _wait_for_round(process, directory, joined["round"] + STEADY)
        _stop(process)
    ours, reference = statistics.median(during), statistics.median(before)
    what = f"a round of {WORKERS - 1} workers while another one joins; median of {len(during)}"
    return Row(what, "s", ours, reference, "rounds before it was started", ours / reference, "<= 1.05")


def _joined_after(directory: Path, began: float) -> Event | None:
    return next((event for event in _events(directory, "worker_joined") if event["time"] > began), None)


def _wait_for_round(process: subprocess.Popen[str], directory: Path, number: int) -> Event:
    """Wait until so many rounds are recorded; return the event of the last."""

    def closed() -> Event | None:
        rounds = _events(directory, "round")
        return rounds[number - 1] if len(rounds) >= number else None

    return _wait_for(process, closed)


def _wait_for(process: subprocess.Popen[str], look: Callable[[], Event | None]) -> Event:
    deadline = time.monotonic() + TIMEOUT
    while (found := look()) is None:
        _check(process)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job has not gone on within {TIMEOUT:.0f} s")
        time.sleep(0.1)
    return found


def _check(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"the job has ended: {process.communicate()[1]}")


def _stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)  # the command that waits for the job; the scheduler ends with the network
    process.communicate(timeout=TIMEOUT)


def _events(directory: Path, kind: str) -> list[Event]:
    return [event for event in _lines(directory / "metrics.jsonl") if event["event"] == kind]


def _lines(path: Path) -> list[Event]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]
