"""One run of a benchmark: its folder, certificates, file to transfer and sizes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from benchmarks.certificates import Organisation

MIB = 1 << 20
TOPIC = "benchmark"
"""Topic that the gossip benchmark uses."""


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

    def file(self, name: str, size: int) -> tuple[Path, str]:
        """Create a file of random bytes; return its path and digest."""
        path, hasher = self.folder / name, blake3()
        with path.open("wb") as file:
            for begin in range(0, size, MIB):
                block = os.urandom(min(MIB, size - begin))
                hasher.update(block)
                file.write(block)
        return path, f"blake3:{hasher.hexdigest()}"

    def check_and_remove(self, path: Path, size: int) -> None:
        """Check the size of a received file, whose digest the receiver has checked, and remove it."""
        if path.stat().st_size != size:
            raise AssertionError(f"{path} has {path.stat().st_size} bytes of {size}")
        path.unlink()


@contextmanager
def open_run(folder: Path | None, *, size: int, repeat: int, count: int, leaves: int) -> Iterator[BenchmarkRun]:
    """Open a run in a new folder inside `folder`, which is removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="hypha-benchmark-", dir=folder))
    try:
        yield BenchmarkRun(place, Organisation(place), size, repeat, count, leaves)
    finally:
        shutil.rmtree(place)
