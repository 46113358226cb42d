"""The interface of an isolation layer, and what a layer is told about a job and changes about its start.

`stack` probes the layers when the worker starts and applies those that work, in
the order of the list there. A layer never guesses from versions: its probe tries what it will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from hypha_worker.leasing.capacity import Allocation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Confinement:
    """What one run of an executor may use."""

    name: str
    """Unique on this machine, and a valid file name: cgroups and log lines carry it."""
    work_dir: Path
    """Absolute path of its folder, in which it may do everything."""
    socket_path: Path
    """Absolute path of its bridge's socket."""
    allocation: Allocation
    """What its lease has allocated."""
    storage: int
    """Bytes that it may store."""
    network: bool = True
    """Whether it may use the network; the bridge is always reachable."""
    readable: Sequence[Path] = ()
    """Further files and folders that it may read, from the owner's configuration."""
    writable: Sequence[Path] = ()
    """Further files and folders that it may also change."""


@dataclass(slots=True)
class Launch:
    """How a process is started. Layers change it one after the other; `launcher` carries out its steps."""

    command: list[str]
    """Program, as an absolute path, and arguments. A layer may put a program of its own in front."""
    env: dict[str, str]
    steps: dict[str, Any] = field(default_factory=dict)
    """What `launcher` does in the new process before it runs `command`, by the name of the step; values are plain."""
    descriptors: list[int] = field(default_factory=list)
    """Further file descriptors that the process inherits."""
    reports_signals_as_status: bool = False
    """Whether the program in front reports a command that a signal ended by the exit code 128 + its number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a probe."""

    works: bool
    detail: str
    """One line for the owner: what it holds back here, or why it does not work."""
    features: Collection[str] = ()
    """What it holds back here and not on every system: ``tcp``, ``signals``, ``cpu``."""


class Confined(Protocol):
    """A layer's part in one run, from before its start until all of its processes are gone.

    Layers inherit what they have no part in.
    """

    def apply(self, launch: Launch) -> None:
        """Change how the process is started."""
        ...

    def pids(self) -> Sequence[int] | None:
        """Return the ids of all processes of the run that live, or None if this layer does not know them."""
        return None

    def kill(self) -> bool:
        """Send SIGKILL to all processes of the run at once; return False if this layer cannot."""
        return False

    def describe_end(self, exit_code: int) -> str | None:
        """Return why the process ended, if this layer ended it: it exceeded a limit, for example."""
        return None


class Layer(Protocol):
    """One way of isolating an executor."""

    @property
    def name(self) -> str:
        """Its name in ``[isolation] require``."""
        ...

    def probe(self) -> Finding:
        """Try whether it works on this machine, for this user. May block for some hundred milliseconds."""
        ...

    def confine(self, confinement: Confinement) -> AbstractAsyncContextManager[Confined]:
        """Prepare one run, and clean up after it; called only if the probe found that it works."""
        ...

    def sweep(self) -> None:
        """Remove what a killed worker's runs have left; called when no run of this worker exists.

        Most layers leave nothing that outlives the processes or the worker.
        """
        return


async def in_own_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own: the end of a run must not wait for other jobs' threads."""
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))
