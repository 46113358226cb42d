"""Batch inference over a network of real processes, against plain scripts of transformers on the same rows.

Two workers of one thread classify images of 32×32 pixels with a ResNet-18, and images of 8×8 pixels with the model of
the digits demo, whose rows are so cheap that they show the cost of a result; two plain processes of one thread do the
same in turns with them. They generate text with a language model of 25 million parameters, in turns with one process of
two threads. Then the time until the first part, and the rows that are computed in all when a worker is killed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Final

import numpy
from safetensors.numpy import save_file

from benchmarks.job_network import JOB_TIMEOUT, JobNetwork, job_network
from benchmarks.run import BenchmarkRun, between
from benchmarks.tables import Row
from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.processes import script

BATCH: Final = 64
MANY: Final = "many"
FEW: Final = "few"
LARGE: Final = "large"
TEXTS: Final = "texts"
DATASETS: Final = {MANY: 24, FEW: 4, LARGE: 24, TEXTS: 16}
"""Slices of each dataset; those of `FEW` have one batch."""
ROWS_A_COUNT: Final = {MANY: 480, LARGE: 24}
"""Rows of a dataset for each of `BenchmarkRun.count`."""
SHAPES: Final = {MANY: (1, 8, 8), FEW: (1, 8, 8), LARGE: (3, 32, 32)}
RESNET_18: Final = {
    "model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_channels": 3, "embedding_size": 64,
    "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic",
}  # fmt: skip
LLAMA: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 512,
    "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""25 million parameters; its tokens are bytes, none of which ends a text."""
PROMPT_BYTES: Final = (24, 56)
"""Shortest and longest prompt."""
NEW_TOKENS: Final = 24
TEXTS_AT_ONCE: Final = 8
"""Rows of a batch of a worker; the reference has those of both."""
KILLED_AT: Final = 0.4
"""Share of the parts that are there when a worker is killed."""
IN_HAND: Final = 2
"""Slices that a worker has at a time."""
POLL: Final = 0.02
ONE_THREAD: Final = ("OMP_NUM_THREADS", "1")
Part = tuple[float, int]
"""When a part was complete, in seconds since the epoch, and its rows."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure rates, the time to the first part, and the cost of a killed worker."""
    _prepare(run)
    _prepare_texts(run)
    data = "".join(f'[[datasets]]\nname = "{name}"\npath = {json.dumps(str(run.folder / name))}\n' for name in DATASETS)
    with job_network(_worker(), workers=3, data=data) as network:
        bench = _Bench(run.folder, network)
        bench.rate(MANY)  # warms everything up
        large = between(lambda: bench.plain_rate(LARGE), lambda: bench.rate(LARGE), run.repeat)
        texts = between(bench.plain_tokens, bench.tokens, run.repeat)
        small = between(lambda: bench.plain_rate(MANY), lambda: bench.rate(MANY), run.repeat)
        starts = [(bench.plain_start(), bench.start()) for _ in range(run.repeat)]
        computed = [bench.computed() for _ in range(run.repeat)]
    rates = [_rate_row(run, LARGE, large, ">= 0.9"), _rate_row(run, MANY, small, "")]
    rates.insert(1, _tokens_row(run, texts))
    return [*rates, _start_row(starts), _lost_row(computed)]


def _prepare(run: BenchmarkRun) -> None:
    """Create the models and datasets."""
    config = run.folder / "resnet-18.json"
    config.write_text(json.dumps(RESNET_18))
    for name, what in {MANY: ("--arch", "resnet-digits"), LARGE: ("--config-json", str(config))}.items():
        _command("hypha-accelerate-executor", "create-model", *what, "--out", str(_model(run.folder, name)))
    sizes = {name: run.count * rows for name, rows in ROWS_A_COUNT.items()} | {FEW: DATASETS[FEW] * BATCH}
    for name, slices in DATASETS.items():
        if name == TEXTS:
            continue
        images = numpy.random.default_rng(0).random((sizes[name], *SHAPES[name]), dtype=numpy.float32)
        source = run.folder / f"{name}.safetensors"
        save_file({"pixel_values": images}, source)
        _command("hypha-data", "prepare", str(source), "--out", str(run.folder / name), "--slices", str(slices))


def _prepare_texts(run: BenchmarkRun) -> None:
    """Create a language model with random weights, and prompts of random letters."""
    config, model = run.folder / "llama.json", _model(run.folder, TEXTS)
    config.write_text(json.dumps(LLAMA))
    what = ("--task", "causal-lm", "--config-json", str(config))
    _command("hypha-accelerate-executor", "create-model", *what, "--out", str(model))
    add_byte_tokenizer(model)
    random = Random(0)
    prompts = ("".join(random.choices(ascii_lowercase, k=random.randint(*PROMPT_BYTES))) for _ in range(_texts(run)))
    source = run.folder / f"{TEXTS}.jsonl"
    source.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in prompts))
    _command("hypha-data", "prepare", str(source), "--out", str(run.folder / TEXTS), "--slices", str(DATASETS[TEXTS]))


def _texts(run: BenchmarkRun) -> int:
    """Return the number of prompts."""
    return max(1, run.count // 2 // DATASETS[TEXTS]) * DATASETS[TEXTS]


def _model(folder: Path, dataset: str) -> Path:
    return folder / f"model-{MANY if dataset == FEW else dataset}"


def _command(program: str, *words: str) -> None:
    subprocess.run([script(program), *words], check=True, capture_output=True, timeout=JOB_TIMEOUT)


def _worker() -> str:
    """Return TOML of a worker of one thread."""
    args = ["-m", "hypha.accelerate_executor.inference"]
    args += ["--socket", "{SOCKET_PATH}", "--work-dir", "{WORK_DIR}", "--job", "{JOB_JSON}"]
    environment = f'env = {{ {ONE_THREAD[0]} = "{ONE_THREAD[1]}" }}\n'
    executor = f"cmd = {json.dumps(sys.executable)}\nargs = {json.dumps(args)}\n{environment}"
    resources = "[resources]\ncpu = 1\nmemory = 4\nstorage = 20\n"
    return f'{resources}[[executors]]\nclass = "inference"\nname = "transformers"\nruntime = "process"\n{executor}'


def _rate_row(run: BenchmarkRun, name: str, rates: Sequence[tuple[float, float]], bound: str) -> Row:
    plain, ours = map(statistics.median, zip(*rates, strict=True))
    ratio = statistics.median(one / other for other, one in rates)
    model = "ResNet-18" if name == LARGE else "digits ResNet"
    what = f"{model}, {run.count * ROWS_A_COUNT[name]} images in {DATASETS[name]} slices, two workers of one thread"
    return Row(what, "rows/s", ours, plain, "two plain processes of one thread", ratio, bound)


def _tokens_row(run: BenchmarkRun, rates: Sequence[tuple[float, float]]) -> Row:
    plain, ours = map(statistics.median, zip(*rates, strict=True))
    ratio = statistics.median(one / other for other, one in rates)
    what = f"Llama of 25 M parameters, {_texts(run)} texts of {NEW_TOKENS} tokens, two workers of one thread"
    reference = "`generate_batch`, one process of two threads"
    return Row(what, "tokens/s", ours, plain, reference, ratio, ">= 0.8")


def _start_row(starts: Sequence[tuple[float, float]]) -> Row:
    plain, ours = map(statistics.median, zip(*starts, strict=True))
    more = statistics.median(one - other for other, one in starts)
    what = f"submit to the first part of {BATCH} rows: {more:+.1f} s"
    return Row(what, "s", ours, plain, "plain script to its first batch", ours / plain, "<= +3 s")


def _lost_row(computed: Sequence[tuple[int, int]]) -> Row:
    assigned, rows = max(computed)
    what = f"rows computed in all, one worker of three killed at {KILLED_AT:.0%}; the most of {len(computed)} jobs"
    bound = f"<= {1 + IN_HAND / DATASETS[MANY]:.3f}"
    return Row(what, "rows", assigned, rows, "rows", assigned / rows, bound)


@dataclass(frozen=True)
class _Bench:
    """What is measured, on a running network."""

    folder: Path
    network: JobNetwork

    def rate(self, dataset: str) -> float:
        """Return rows/s from the first to the last part, without those of the first."""
        rate: float = self.network.run(self._job(dataset, workers=2))["rows_per_second"]
        return rate

    def plain_rate(self, dataset: str) -> float:
        """Return the same of two plain processes, which have half of the slices each."""
        slices = sorted((self.folder / dataset).glob("slice-*"))
        processes = [self._start_plainly(dataset, slices[half::2]) for half in range(2)]
        parts = sorted(part for process in processes for part in _parts(process) if part[1])
        return sum(rows for _, rows in parts[1:]) / (parts[-1][0] - parts[0][0])

    def tokens(self) -> float:
        """Return tokens/s from the first to the last part, without those of the first."""
        job = self._job(TEXTS, workers=2)
        job["model"]["type"] = "causal-lm"
        job["inference"] = {
            "task": "generate", "prompt": "{text}", "max_new_tokens": NEW_TOKENS, "batch_size": TEXTS_AT_ONCE,
        }  # fmt: skip
        rate: float = self.network.run(job)["tokens_per_second"]
        return rate

    def plain_tokens(self) -> float:
        """Return tokens/s of one plain process of two threads, after its first batch."""
        command = [sys.executable, "-m", "benchmarks.programs.plain_generation", str(_model(self.folder, TEXTS))]
        command += [str(2 * TEXTS_AT_ONCE), str(NEW_TOKENS)]
        command += map(str, sorted((self.folder / TEXTS).glob("slice-*")))
        environment = os.environ | {ONE_THREAD[0]: "2"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=JOB_TIMEOUT, env=environment)
        seconds, tokens = done.stdout.split()[-2:]
        return int(tokens) / float(seconds)

    def plain_start(self) -> float:
        """Return seconds from the start of a plain process to its first batch."""
        [first, *_] = sorted((self.folder / FEW).glob("slice-*"))
        began = time.time()
        return _parts(self._start_plainly(FEW, [first]))[0][0] - began

    def start(self) -> float:
        """Return seconds from the start of the command `submit` to the first part on disk."""
        began = time.perf_counter()
        process, directory = self.network.start(self._job(FEW, workers=1))
        _wait_for_parts(process, directory, 1)
        seconds = time.perf_counter() - began
        self.network.result(process, directory)
        return seconds

    def computed(self) -> tuple[int, int]:
        """Kill a worker during a job; return the rows that were assigned, and those that there are."""
        process, directory = self.network.start(self._job(MANY, workers=3))
        _wait_for_parts(process, directory, round(DATASETS[MANY] * KILLED_AT))
        self.network.kill("worker-3")
        result = self.network.result(process, directory)
        self.network.start_nodes("worker-3")
        return result["rows_assigned"], result["rows"]

    def _job(self, dataset: str, *, workers: int) -> dict[str, Any]:
        return {
            "type": "inference",
            "dataset": dataset,
            "model": {"path": str(_model(self.folder, dataset)), "type": "vision-classification"},
            "inference": {"task": "classify", "batch_size": BATCH},
            "resources": {"num_workers": workers, "worker": {"cpu": 1}},
        }

    def _start_plainly(self, dataset: str, slices: Sequence[Path]) -> subprocess.Popen[str]:
        out = self.folder / "plain"
        out.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.programs.plain_inference", str(_model(self.folder, dataset))]
        command += [str(BATCH), str(out), *map(str, slices)]
        environment = os.environ | dict([ONE_THREAD])
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def _wait_for_parts(process: subprocess.Popen[str], directory: Path, count: int) -> None:
    until = time.monotonic() + JOB_TIMEOUT
    while sum(1 for _ in (directory / "results").glob("part-*")) < count:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{directory}: it has fewer than {count} parts")
        time.sleep(POLL)


def _parts(process: subprocess.Popen[str]) -> list[Part]:
    output, _ = process.communicate(timeout=JOB_TIMEOUT)
    if process.returncode != 0:
        raise RuntimeError(f"the plain script exited with status {process.returncode}")
    return [(float(at), int(rows)) for at, rows in map(str.split, output.splitlines())]
