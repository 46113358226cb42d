"""Training jobs over a network of real processes, against plain loops of torch and transformers.

Two workers of one thread train the models of the digits and the text demo, in turns with two plain processes of one
thread that train on batches of the same slices; the text demo's also on links that delay every byte. Then, how long
workers stand still of which one is twice and one four times slower, and what a worker of half the memory adds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.job_network import JOB_TIMEOUT, JobNetwork, job_network
from benchmarks.run import BenchmarkRun, between
from benchmarks.tables import Row
from hypha.accelerate_executor.environment import DELAY_VARIABLE
from hypha_local.demo_tasks import DIGITS, TEXT, DemoTask
from hypha_local.processes import script

TRAINER: Final = "diloco-transformer"
SERVER: Final = "parameter-server"
WORKERS: Final = 2
SLICES_PER_WORKER: Final = 4
"""As in the demo."""
STEPS: Final = {DIGITS.name: 100, TEXT.name: 15}
"""Batches of each worker in a round, on average."""
LINK: Final = 0.05
"""Seconds that a byte takes from one node to the other."""
DELAYS: Final = (0.05, 0.1, 0.2)
"""Seconds that a batch of each uneven worker takes longer than its computation, so that this hardly matters."""
UNEVEN_SAMPLES: Final = 140 * DIGITS.batch_size
"""Samples of a round of the uneven workers: about 4 s."""
MEMORY: Final = (2, 1)
"""GB of two workers: the second one computes a batch of `LARGE_BATCH` in parts."""
LARGE_BATCH: Final = 64
LARGE_STEPS: Final = 6
PLAIN_STEPS: Final = {DIGITS.name: 1500, TEXT.name: 100}
Event = Mapping[str, Any]


@dataclass(frozen=True)
class WorkerTime:
    """What a worker did in one round, or in several."""

    samples: float
    compute_seconds: float
    data_wait_seconds: float
    report_wait_seconds: float

    @property
    def waited(self) -> float:
        """Seconds that steps waited for data or for the network."""
        return self.data_wait_seconds + self.report_wait_seconds

    @property
    def trained(self) -> float:
        """Seconds between two synchronisations: computing, and waiting for data and the network."""
        return self.compute_seconds + self.waited


def worker_times(events: Iterable[Event], first: int = 2) -> dict[str, WorkerTime]:
    """Sum up what each worker has done from round `first` on, from the events of a job.

    Raises:
        KeyError: a worker does not state one of the numbers.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["event"] == "metric" and event["round"] >= first:
            sums[event["worker"]][event["name"]] += event["value"]
    names = [field.name for field in fields(WorkerTime)]
    return {worker: WorkerTime(**{name: dict(values)[name] for name in names}) for worker, values in sums.items()}


def rounds_span(events: Iterable[Event]) -> tuple[float, int]:
    """Return the seconds from the end of the first round to that of the last, and the samples of these rounds."""
    rounds = [event for event in events if event["event"] == "round"]
    return rounds[-1]["time"] - rounds[0]["time"], sum(event["samples"] for event in rounds[1:])


def idle_share(events: Sequence[Event]) -> float:
    """Return the share of their time, from the end of the first round to that of the last, that workers compute not."""
    seconds, _ = rounds_span(events)
    times = worker_times(events)
    return 1.0 - sum(time.compute_seconds for time in times.values()) / (len(times) * seconds)


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure rates, also on slow links, and idle time of uneven workers."""
    data = _prepare(run, DIGITS) + _prepare(run, TEXT)
    rounds = {DIGITS.name: max(4, run.count // 25), TEXT.name: max(4, run.count // 80)}
    trainers = [_trainer() + f'[cache]\npath = "../cache-{number}"\n' for number in range(WORKERS)]  # as of `init`
    with job_network([*trainers, _server()], data=data) as network:
        near = _Bench(run.folder, network)
        digits, text = (near.pairs(task, rounds[task.name], run.repeat) for task in (DIGITS, TEXT))
    with job_network([*trainers, _server()], data=data, delay=LINK) as network:
        far = _Bench(run.folder, network).pairs(TEXT, rounds[TEXT.name], run.repeat)
    with job_network([*map(_trainer, DELAYS), _server()], data=data) as network:
        idle = _Bench(run.folder, network).idle(max(4, run.count // 60))
    workers = [_trainer(memory=memory, also=_of_memory(memory)) for memory in MEMORY]
    with job_network([*workers, _server()], data=data) as network:
        alone, together = _Bench(run.folder, network).unequal(max(3, run.count // 100))
    return [
        _rate_row(_title(DIGITS, "between synchronisations"), digits, 0, ">= 0.7"),
        _rate_row(_title(DIGITS, "rounds included"), digits, 1, ">= 0.6"),
        _rate_row(_title(TEXT, "between synchronisations"), text, 0, ">= 0.95"),
        _rate_row(_title(TEXT, f"{1000 * LINK:.0f} ms from node to node, between synchronisations"), far, 0, ">= 0.85"),
        _idle_row(idle),
        Row(
            f"text, batches of {LARGE_BATCH}, two workers of {MEMORY[0]} and {MEMORY[1]} GB: rounds included",
            "samples/s", together, alone, "the sum of both alone", together / alone, ">= 0.85",
        ),
    ]  # fmt: skip


def _prepare(run: BenchmarkRun, task: DemoTask) -> str:
    """Create a task's model and dataset; return TOML of the data node."""
    model = ("--arch", task.arch, "--task", task.wire)
    _command("hypha-accelerate-executor", "create-model", *model, "--out", str(_model(run.folder, task)))
    source, folder = run.folder / f"{task.name}.safetensors", run.folder / task.name
    task.write(source, run.folder / f"{task.name}-test.safetensors")
    slices = str(SLICES_PER_WORKER * WORKERS)
    _command("hypha-data", "prepare", str(source), "--out", str(folder), "--slices", slices)
    return f'[[datasets]]\nname = "{task.name}"\npath = {json.dumps(str(folder))}\n'


def _model(folder: Path, task: DemoTask) -> Path:
    return folder / f"model-{task.name}"


def _command(program: str, *words: str) -> None:
    subprocess.run([script(program), *words], check=True, capture_output=True, timeout=JOB_TIMEOUT)


def _trainer(delay: float = 0.0, memory: int = 4, also: str | None = None) -> str:
    """Return TOML of a worker of one thread.

    Args:
        delay: seconds that its batches take longer.
        memory: GB that it has, and that a job gets that asks for none.
        also: a further name of its executor.
    """
    args = ["-m", "hypha.accelerate_executor.training"]
    args += ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    command = f"cmd = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\n"
    slowed = f'env = {{ {DELAY_VARIABLE} = "{delay}" }}\n'
    executors = (
        f'[[executors]]\nclass = "train"\nname = "{name}"\nruntime = "process"\n{command}{slowed}'
        for name in (TRAINER, also)
        if name is not None
    )
    return f"{_resources(memory)}[resources.default]\nmemory = {memory}\n{''.join(executors)}"


def _of_memory(memory: int) -> str:
    return f"{TRAINER}-{memory}"


def _server() -> str:
    executor = f'class = "aggregate"\nname = "{SERVER}"\nruntime = "parameter-server"\n'
    return f"{_resources(1)}\n[[executors]]\n{executor}"


def _resources(memory: int) -> str:
    return f"drain_timeout = 0\n[resources]\ncpu = 1\nmemory = {memory}\nstorage = 4\n"


@dataclass(frozen=True)
class _Bench:
    """What is measured, on a running network."""

    folder: Path
    network: JobNetwork

    def pairs(self, task: DemoTask, rounds: int, repeat: int) -> list[tuple[float, tuple[float, float]]]:
        """Return the rates of two plain processes and of two workers, measured in turns."""
        return between(lambda: self.plain_rate(task), lambda: self.rates(task, rounds), repeat)

    def rates(self, task: DemoTask, rounds: int) -> tuple[float, float]:
        """Return samples/s of two workers between synchronisations, summed, and with rounds included."""
        events = self._events(task, rounds, WORKERS)
        seconds, samples = rounds_span(events)
        return sum(time.samples / time.trained for time in worker_times(events).values()), samples / seconds

    def plain_rate(self, task: DemoTask) -> float:
        """Return samples/s of two plain processes that train at the same time, on half of the slices each."""
        slices = sorted((self.folder / task.name).glob("slice-*"))
        with ExitStack() as running:
            processes = [running.enter_context(self._start_plainly(task, slices[half::2])) for half in range(2)]
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            return sum(map(_rate, processes))

    def idle(self, rounds: int) -> float:
        """Return the share of their time in which uneven workers do not compute."""
        return idle_share(self._events(DIGITS, rounds, len(DELAYS), UNEVEN_SAMPLES))

    def unequal(self, rounds: int) -> tuple[float, float]:
        """Return samples/s of the workers of `MEMORY` alone, summed, and of both together; none runs out of memory."""
        alone = sum(self._large(rounds, 1, _of_memory(memory)) for memory in MEMORY)
        return alone, self._large(rounds, len(MEMORY), TRAINER)

    def _large(self, rounds: int, workers: int, kind: str) -> float:
        job = self._job(TEXT, rounds, workers, LARGE_BATCH * LARGE_STEPS * workers)
        job["rounds"]["batch_size"] = LARGE_BATCH
        job["resources"]["worker"]["kind"] = kind
        events = self._run(job)
        if any(event["event"] in ("worker_restarted", "worker_replaced") for event in events):
            raise RuntimeError("a worker was restarted or replaced, so it has run out of memory")
        seconds, samples = rounds_span(events)
        return samples / seconds

    def _events(self, task: DemoTask, rounds: int, workers: int, samples: int | None = None) -> list[Event]:
        return self._run(self._job(task, rounds, workers, samples))

    def _run(self, job: Mapping[str, Any]) -> list[Event]:
        process, directory = self.network.start(job)
        self.network.result(process, directory)
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_bytes().splitlines()]

    def _job(self, task: DemoTask, rounds: int, workers: int, samples: int | None) -> dict[str, Any]:
        price = {"bid": 100.0, "max": 120.0}
        return {
            "type": "diloco",
            "dataset": task.name,
            "model": {"path": str(_model(self.folder, task)), "type": task.type},
            "inner_optimizer": {"learning_rate": task.learning_rate},
            "outer_optimizer": {"learning_rate": task.outer_learning_rate, "momentum": task.outer_momentum},
            "rounds": {
                "update_rounds": rounds,
                "avg_samples_between_updates": samples or task.batch_size * STEPS[task.name] * workers,
                "batch_size": task.batch_size,
                "checkpoint_every": rounds,
            },
            "resources": {
                "num_workers": workers,
                "worker": {"cpu": 1, "kind": TRAINER},
                "parameter_server": {"cpu": 1, "kind": SERVER},
                "worker_price": price,
                "parameter_server_price": price,
            },
        }

    def _start_plainly(self, task: DemoTask, slices: Sequence[Path]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.programs.plain_training", str(_model(self.folder, task))]
        command += [str(task.batch_size), str(task.learning_rate), str(PLAIN_STEPS[task.name]), *map(str, slices)]
        return subprocess.Popen(
            command,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def _rate(process: subprocess.Popen[str]) -> float:
    """Wait for a plain process; return its samples/s."""
    output, _ = process.communicate(timeout=JOB_TIMEOUT)
    if process.returncode != 0:
        raise RuntimeError(f"the plain script exited with status {process.returncode}")
    seconds, samples = output.split()
    return int(samples) / float(seconds)


def _title(task: DemoTask, what: str) -> str:
    return f"{task.name}, two workers of one thread, rounds of {STEPS[task.name]} batches each: {what}"


def _rate_row(what: str, pairs: Sequence[tuple[float, tuple[float, float]]], which: int, bound: str) -> Row:
    plain = statistics.median(other for other, _ in pairs)
    ours = statistics.median(rates[which] for _, rates in pairs)
    ratio = statistics.median(rates[which] / other for other, rates in pairs)
    return Row(what, "samples/s", ours, plain, "two plain loops of one thread", ratio, bound)


def _idle_row(idle: float) -> Row:
    speeds = ":".join(f"{delay / min(DELAYS):.0f}" for delay in DELAYS)
    what = f"digits, three workers whose batches take {speeds}: share of their time without computing, rounds included"
    return Row(what, "%", 100 * idle, bound="<= 10 %")
