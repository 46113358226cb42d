"""One run of a benchmark: its folder, certificates, file to transfer and sizes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from benchmarks.certificates import Organisation

MIB = 1 << 20
PAGE_REPORTING = Path("/sys/module/page_reporting")
"""Exists where Linux can report free memory to a virtual machine's host."""
REPORTING_DELAY = 2.5
"""Seconds after which memory that became free has been reported."""
MIN_SETTLED = 64 * MIB
"""Size of the smallest files whose rate depends on it."""
TOPIC = "benchmark"
"""Topic that the gossip benchmark uses."""
T = TypeVar("T")


def between(reference: Callable[[], float], measure: Callable[[], T], repeat: int) -> list[tuple[float, T]]:
    """Measure between two runs of the reference each; return the mean of these two with what was measured.

    The speed of a virtual machine drifts by several percent within the seconds of a measurement.
    """
    found, before = [], reference()
    for _ in range(repeat):
        ours, after = measure(), reference()
        found.append(((before + after) / 2, ours))
        before = after
    return found


@dataclass(frozen=True)
class BenchmarkRun:
    """Folder, certificates and sizes of one run."""

    folder: Path
    organisation: Organisation
    size: int
    """Bytes of the transferred file."""
    repeat: int
    """Number of measurements, in turns with the reference."""
    count: int
    """Number of requests; connections and messages are derived from it."""
    leaves: int
    """Nodes behind a gateway."""
    minutes: float
    """Length of a run with faults."""
    workers: int
    """Workers of the largest simulated network."""
    before: Path | None = None
    """Checkout of another version that is measured in turns."""

    def file(self, name: str, size: int) -> tuple[Path, str]:
        """Create a file of random bytes; return its path and digest."""
        path, hasher = self.folder / name, blake3()
        with path.open("wb") as file:
            for begin in range(0, size, MIB):
                block = os.urandom(min(MIB, size - begin))
                hasher.update(block)
                file.write(block)
        return path, f"blake3:{hasher.hexdigest()}"

    def settle(self) -> None:
        """Let the next file find memory that the host of a virtual machine has not taken back.

        A guest reports free memory to its host about 2 s after it became free, and the host takes it away; writing a
        file to such memory takes 2 s of system time a GiB more. Waiting for the report, then writing and removing a
        file, leaves memory that is there for the next 2 s. Without it, chance decides which measurement pays.
        """
        if self.size < MIN_SETTLED:
            return
        if PAGE_REPORTING.exists():
            time.sleep(REPORTING_DELAY)
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for _ in range(0, self.size, MIB):
                file.write(bytes(MIB))
        ballast.unlink()

    def check_and_remove(self, path: Path, size: int) -> None:
        """Check the size of a received file, whose digest the receiver has checked, and remove it."""
        if path.stat().st_size != size:
            raise AssertionError(f"{path} has {path.stat().st_size} bytes of {size}")
        path.unlink()


@contextmanager
def open_run(
    folder: Path | None,
    *,
    size: int,
    repeat: int,
    count: int,
    leaves: int,
    minutes: float,
    workers: int,
    before: Path | None = None,
) -> Iterator[BenchmarkRun]:
    """Open a run in a new folder inside `folder`, which is removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="hypha-benchmark-", dir=folder))
    try:
        yield BenchmarkRun(place, Organisation(place), size, repeat, count, leaves, minutes, workers, before)
    finally:
        shutil.rmtree(place)
