"""What a lease lets one run use; and the layer `rlimits`: limits of single processes, which every system has.

Memory is not limited by process: CUDA reserves far more address space than it uses.
"""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from hypha_proto.resources import GIGABYTE
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer
from hypha_worker.leasing.capacity import Allocation

CPU_PERIOD: Final = 100_000
"""Microseconds in which a run gets its share of processor time."""
_MIN_CPU_QUOTA: Final = 1000
_BASE_PROCESSES: Final = 512
"""Processes and threads of a run, without those for its cores: an interpreter with torch has about 50."""
_PROCESSES_PER_CORE: Final = 256


def process_limit(cores: float) -> int:
    """Return how many processes and threads a lease of so many cores may have at the same time."""
    return _BASE_PROCESSES + _PROCESSES_PER_CORE * max(1, math.ceil(cores))


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What one run may use; None is no limit."""

    memory: int | None
    """Bytes, swap included."""
    processes: int
    """Processes and threads."""
    cpu: float | None
    """Cores."""

    @classmethod
    def of(cls, allocation: Allocation) -> RunLimits:
        """Return the limits of a lease; what it has none of is not limited."""
        cores, memory = allocation.resources.cpu, int(allocation.resources.memory * GIGABYTE)
        return cls(memory or None, process_limit(cores), cores or None)

    @property
    def cpu_quota(self) -> int | None:
        """Microseconds of processor time in each `CPU_PERIOD`."""
        return None if self.cpu is None else max(_MIN_CPU_QUOTA, int(self.cpu * CPU_PERIOD))


class RlimitsLayer(Layer):
    """Limits files and core dumps; the number of processes is limited by `bubblewrap`, which separates users."""

    name = "rlimits"

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        return Finding(True, "no file is larger than the lease's storage; no core dumps")

    def confine(self, confinement: Confinement) -> nullcontext[Confined]:
        """See `Layer.confine`."""
        return nullcontext(Rlimits(confinement.storage))


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
