"""Program that takes outer steps and copies memory, and measures how long each takes (see `measures.outer_step`)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.children import options, serve_commands
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_step import outer_step
from hypha_proto.update_file import UpdateMetadata, write_update

WEIGHTS: Final = (4.0, 1.0)
TENSORS: Final = 16
"""Number of tensors of a model, all of one size."""
SAMPLE_SECONDS: Final = 0.002


def main() -> None:
    given = options()
    folder, elements = Path(given["folder"]), int(given["size"]) // 4
    model: dict[str, tuple[int, ...]] = {f"layer.{number}": (elements // TENSORS,) for number in range(TENSORS)}
    updates = [_write(folder / f"update-{number}", model, number) for number in range(len(WEIGHTS))]

    def step(threads: int) -> float:
        files, result = list(zip(updates, WEIGHTS, strict=True)), folder / "outer"
        result.unlink(missing_ok=True)  # each round has its own
        began = time.perf_counter()
        outer_step(
            files, folder / "momentum", result, Nesterov(learning_rate=0.7, momentum=0.9), metadata, threads=threads
        )
        return time.perf_counter() - began

    metadata = UpdateMetadata(1)
    source = np.ones(int(given["copied"]), np.uint8)
    target = np.ones_like(source)

    def copy() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def memory(threads: int) -> int:
        before = _anonymous_memory()
        with _Sampler() as sampler:
            step(threads)
        return sampler.largest - before

    serve_commands({}, {"step": step, "copy": copy, "memory": memory})


def _write(path: Path, model: dict[str, tuple[int, ...]], seed: int) -> Path:
    random = np.random.default_rng(seed)
    tensors = ((name, random.normal(0, 0.01, shape).astype(np.float32)) for name, shape in model.items())
    write_update(path, model, tensors, UpdateMetadata())
    return path


def _anonymous_memory() -> int:
    """Return the anonymous resident memory of this process in bytes (Linux only)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report anonymous memory (RssAnon)")


class _Sampler:
    """Largest anonymous memory while the context is open."""

    def __init__(self) -> None:
        self.largest = _anonymous_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.largest = max(self.largest, _anonymous_memory())

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


main()
