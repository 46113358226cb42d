"""The runtimes of executors, by the value of the key `runtime`: each is a folder beside this module.

A folder's module `runtime` holds one object, `RUNTIME`, which implements `Runtime`; it is imported when a configuration
names it. So a further runtime is a new folder and one row of `RUNTIMES`; keys of its own are fields of
`ExecutorSettings` and of the configuration, which the `check` of the others refuses. There are no entry points on
purpose: a worker runs no code of third parties.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from hypha_worker.executor_health import ExecutorHealth
    from hypha_worker.executors.isolation.stack import IsolationStack
    from hypha_worker.executors.process.fork_server_client import ForkServer
    from hypha_worker.logs.run_log import LogFolder
    from hypha_worker.tasks.execution import ExecutionFactory


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Keys of one table ``[[executors]]`` that its runtime interprets; `config` describes them."""

    cmd: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    check: tuple[str, ...] = ()
    network: bool = True
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What all executors of a worker share."""

    socket_folder: Path
    """Where sockets are created; its path is short."""
    has_devices: bool
    """Whether the worker offers GPUs, so that a job sees only those of its lease."""
    logs: LogFolder
    """Where the output of processes is stored."""
    stack: IsolationStack
    """Confines processes."""
    fork_server: ForkServer | None = None
    """Starts processes sooner."""
    health: ExecutorHealth | None = None
    """Notes how the executor that these settings are for has started."""


class Runtime(Protocol):
    """One way of running tasks."""

    def suits(self, kind: str) -> bool:
        """Return whether its executors may be of a class."""
        ...

    def check(self, settings: ExecutorSettings) -> None:
        """Check the settings of an executor.

        Raises:
            ValueError: they do not fit this runtime; the message names the key and the remedy.
        """
        ...

    def make_factory(self, settings: ExecutorSettings, host: HostSettings) -> ExecutionFactory:
        """Return the function that makes an execution of a task by an executor with these settings."""
        ...

    async def find_fault(self, settings: ExecutorSettings, host: HostSettings, work_dir: Path) -> str | None:
        """Return why an executor with these settings cannot start on this machine; None if none is found.

        Args:
            work_dir: an existing folder, in which one for the check is made.
        """
        ...

    def preload(self) -> None:
        """Import what tasks will need, so that the first one does not wait. Called in a thread."""
        ...


@dataclass(frozen=True, slots=True)
class RuntimeEntry:
    """One row of `RUNTIMES`."""

    folder: str
    summary: str
    """What it runs, for the reference of the configuration."""


RUNTIMES: Final[dict[str, RuntimeEntry]] = {
    "process": RuntimeEntry("process", "the command cmd"),
    "parameter-server": RuntimeEntry("parameter_server", "built in"),
}
"""Every runtime by its name in the configuration."""


def command_not_found(cmd: str) -> str:
    """Return that a command is not found, or may not be run by this user, with the remedy."""
    if "/" not in cmd:
        return f"{cmd!r} is not found: install it, or write its absolute path in cmd"
    try:
        Path(cmd).stat()
    except PermissionError:
        return f"{cmd!r} cannot be reached by this worker's user: let uid {os.getuid()} enter the folders on its way"
    except OSError:
        return f"{cmd!r} is not found: install it, or correct its path in cmd"
    return f"{cmd!r} cannot be run by this worker's user: let uid {os.getuid()} execute it"


def find_runtime(name: str) -> Runtime:
    """Return a runtime; its module is imported now.

    Raises:
        ValueError: there is none of this name; the message lists the names.
    """
    entry = RUNTIMES.get(name)
    if entry is None:
        raise ValueError(f"no such runtime; there are {', '.join(sorted(RUNTIMES))}")
    found: Runtime = importlib.import_module(f"{__package__}.{entry.folder}.runtime").RUNTIME
    return found


def check_executor(name: str, kind: str, settings: ExecutorSettings) -> None:
    """Check that an executor's class and settings fit its runtime.

    Args:
        name: the runtime.
        kind: class of the executor.
        settings: its other keys.

    Raises:
        ValueError: they do not.
    """
    runtime = find_runtime(name)
    if not runtime.suits(kind):
        suitable = [f'"{other}"' for other in RUNTIMES if find_runtime(other).suits(kind)]
        raise ValueError(
            f'runtime = "{name}" cannot run what is of class "{kind}": set runtime = {" or ".join(suitable)}'
        )
    runtime.check(settings)
