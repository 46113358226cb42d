"""The layer `rlimits`: limits of single processes, which every system has.

Memory is not limited this way: CUDA reserves far more address space than it uses.
"""

from __future__ import annotations

import math
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer

_BASE_PROCESSES: Final = 512
"""Processes and threads of a run, without those for its cores: an interpreter with torch has about 50."""
_PROCESSES_PER_CORE: Final = 256


class RlimitsLayer(Layer):
    """Limits files and core dumps; the number of processes is limited by `bubblewrap`, which separates users."""

    name = "rlimits"

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        return Finding(True, "no file is larger than the lease's storage; no core dumps")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[Rlimits]:
        """See `Layer.confine`."""
        yield Rlimits(confinement.storage)


@dataclass(frozen=True, slots=True)
class Rlimits(Confined):
    """The limits of one run."""

    storage: int

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`."""
        launch.steps["rlimits"] = {"RLIMIT_FSIZE": [self.storage, self.storage], "RLIMIT_CORE": [0, 0]}

    def describe_end(self, exit_code: int) -> str | None:
        """Return whether a file became too large."""
        if exit_code != -signal.SIGXFSZ:
            return None
        return f"wrote a file of more than the {self.storage / 1e9:g} GB of its lease (storage): request more"


def process_limit(cores: float) -> int:
    """Return how many processes and threads a lease of so many cores may have at the same time."""
    return _BASE_PROCESSES + _PROCESSES_PER_CORE * max(1, math.ceil(cores))
