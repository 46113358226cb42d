"""Where and how large a benchmark runs: a folder of its own, certificates, a file to move."""

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
"""What nodes talk about where gossip is measured."""


@dataclass(frozen=True)
class Setting:
    """One run."""

    folder: Path
    organisation: Organisation
    size: int
    """Bytes of the file that moves."""
    repeat: int
    """How often each thing is measured, in turns with its reference."""
    count: int
    """Requests, connections, messages to measure."""
    leaves: int
    """Nodes behind a gateway."""

    def file(self, name: str, size: int) -> tuple[Path, str]:
        """A file of random bytes, and its digest."""
        path, hasher = self.folder / name, blake3()
        with path.open("wb") as file:
            for begin in range(0, size, MIB):
                block = os.urandom(min(MIB, size - begin))
                hasher.update(block)
                file.write(block)
        return path, f"blake3:{hasher.hexdigest()}"

    def arrived(self, path: Path, size: int) -> None:
        """Check that a file is there whole (its digest was checked by who took it), and remove it."""
        if path.stat().st_size != size:
            raise AssertionError(f"{path} has {path.stat().st_size} bytes of {size}")
        path.unlink()


@contextmanager
def opened(folder: Path | None, *, size: int, repeat: int, count: int, leaves: int) -> Iterator[Setting]:
    """A setting in a new folder (inside `folder`), which is gone in the end."""
    place = Path(tempfile.mkdtemp(prefix="hypha-benchmark-", dir=folder))
    try:
        yield Setting(place, Organisation(place), size, repeat, count, leaves)
    finally:
        shutil.rmtree(place)
