"""The runtimes of executors, by the value of the key `runtime`: each is a folder beside this module.

A folder's module `runtime` holds one object, `RUNTIME`, which implements `Runtime`; it is imported when a configuration
names it. So a further runtime is a new folder and one row of `RUNTIMES`. A key that it alone has is a field of
`ExecutorSection`, and the `check` of every other runtime refuses it. There are no entry points on purpose: a worker
runs no code of third parties.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from pydantic import AfterValidator, Field, model_validator

from hypha_net.node.config.models import Section
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.worker_status import OfferedExecutor

if TYPE_CHECKING:
    from hypha_worker.executor_health import ExecutorHealth
    from hypha_worker.executors.isolation.stack import IsolationStack
    from hypha_worker.executors.process.fork_server_client import ForkServer
    from hypha_worker.logs.run_log import LogFolder
    from hypha_worker.tasks.execution import ExecutionFactory


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What an executor needs to know of its worker."""

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
    """Notes how the executor has started."""


class Runtime(Protocol):
    """One way of running tasks."""

    def suits(self, kind: str) -> bool:
        """Return whether its executors may be of a class."""
        ...

    def check(self, settings: ExecutorSection) -> None:
        """Check the settings of an executor.

        Raises:
            ValueError: they do not fit this runtime; the message names the key and the remedy.
        """
        ...

    def make_factory(self, settings: ExecutorSection, host: HostSettings) -> ExecutionFactory:
        """Return the function that makes an execution of a task by an executor with these settings."""
        ...

    async def find_fault(self, settings: ExecutorSection, host: HostSettings, work_dir: Path) -> str | None:
        """Return why an executor with these settings cannot start on this machine; None if none is found.

        Args:
            work_dir: an existing folder, in which one for the check is made.
        """
        ...

    def preload(self) -> None:
        """Import what tasks will need, so that the first one does not wait. Called in a thread."""
        ...


RUNTIMES: Final = {"process": "the command cmd", "parameter-server": "built in"}
"""What every runtime runs, by its name in the configuration; its folder has the name with ``_`` for ``-``."""


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
    if name not in RUNTIMES:
        raise ValueError(f"no such runtime; there are {', '.join(sorted(RUNTIMES))}")
    found: Runtime = importlib.import_module(f"{__package__}.{name.replace('-', '_')}.runtime").RUNTIME
    return found


def _executor_class(name: str) -> str:
    if not _EXECUTOR_CLASS.fullmatch(name):
        raise ValueError("no class: use at most 32 lower-case letters, digits and hyphens, beginning with a letter")
    return name


def _runtime(name: str) -> str:
    find_runtime(name)
    return name


_EXECUTOR_CLASS: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
RuntimeName = Annotated[str, AfterValidator(_runtime)]
ExecutorName = Annotated[str, Field(min_length=1)]
ExecutorClassName = Annotated[str, AfterValidator(_executor_class)]


class ExecutorSection(Section):
    """``[[executors]]``."""

    job_class: ExecutorClassName = Field(
        alias="class",
        description="What it runs: train for training, aggregate for the parameter server, inference for batch "
        "inference; any other name, such as shell, for tasks of jobs that ask for it.",
    )
    name: ExecutorName = Field(description="Name by which schedulers ask for it, such as diloco-transformer.")
    runtime: RuntimeName = Field(
        default="process",
        description=" ".join(f"{name}: {summary}." for name, summary in RUNTIMES.items()),
    )
    cmd: str | None = Field(default=None, description="The command of a process.")
    args: list[str] = Field(
        default=[], description="Its arguments; {SOCKET_PATH}, {WORK_DIR}, {JOB_JSON} and {JOB_FILE} are filled in."
    )
    env: dict[str, str] = Field(
        default={}, description="Environment variables of a process, in addition to those that it gets in any case."
    )
    check: list[str] = Field(
        default=[],
        description="A command and its arguments that runs in the sandbox before the executor is offered, such as "
        "python -c 'import torch'; if it fails or takes over 120 s, the executor is not offered.",
    )
    network: bool = Field(
        default=True, description="Whether a process may use the network; it reaches its job bridge in any case."
    )
    readable: list[Path] = Field(
        default=[],
        description="Files and folders that a process may read, in addition to the system's, its program's and those "
        "that args and env name by absolute paths.",
    )
    writable: list[Path] = Field(
        default=[], description="Files and folders that a process may also change, such as ~/.cache/uv."
    )

    sharded: bool = Field(
        default=False,
        description="Whether it distributes one model over several GPUs, as with device_map or FSDP. Only then may a "
        "lease for it have the GPU memory that was requested on several GPUs.",
    )

    @model_validator(mode="after")
    def _fits_runtime(self) -> ExecutorSection:
        runtime = find_runtime(self.runtime)
        if not runtime.suits(self.job_class):
            suitable = [f'"{other}"' for other in RUNTIMES if find_runtime(other).suits(self.job_class)]
            raise ValueError(
                f'runtime = "{self.runtime}" cannot run what is of class "{self.job_class}": '
                f"set runtime = {' or '.join(suitable)}"
            )
        runtime.check(self)
        return self

    @property
    def is_installed(self) -> bool:
        """Whether its command, if it has one, is found."""
        return self.cmd is None or self.find_command() is not None

    def find_command(self) -> str | None:
        """Return the path of its command, found by the PATH that its process has; None if there is none."""
        return shutil.which(self.cmd or "", path=self.env.get("PATH"))

    @property
    def kind(self) -> str:
        """Its class and name, by which tasks ask for it: ``shell/render``."""
        return f"{self.job_class}/{self.name}"

    @property
    def offered(self) -> OfferedExecutor:
        """What is said of it to schedulers."""
        return OfferedExecutor(self.job_class, self.name, self.runtime)

    @property
    def descriptors(self) -> tuple[ExecutorDescriptor, ...]:
        """The descriptors by which it is requested: with its class and without."""
        return ExecutorDescriptor(self.job_class, self.name), ExecutorDescriptor("", self.name)
