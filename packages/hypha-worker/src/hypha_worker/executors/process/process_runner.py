"""Runs one command as a process: placeholders, environment, output, measurement, and the end of its process tree.

When `ProcessRunner.run` returns, `process_tree` has ended the process and every descendant that it can find.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_worker.errors import ExecutionError, ExecutorExitError, ExecutorStartError, WorkReturnedError
from hypha_worker.executors.isolation.layers import Confinement, Launch
from hypha_worker.executors.isolation.stack import ConfinedRun
from hypha_worker.executors.isolation.visible_paths import (
    configured_paths,
    not_yet_shown,
    program_paths,
    without_ancestors,
)
from hypha_worker.executors.process.environment import (
    JOB_JSON,
    SOCKET_PATH,
    TEMPORARY_FOLDER,
    base_environment,
    substitute,
)
from hypha_worker.executors.process.output_log import OutputLog
from hypha_worker.executors.process.process_tree import (
    KILL_GRACE,
    SHUTDOWN_GRACE,
    TERM_GRACE,
    TOKEN_VARIABLE,
    is_in_run,
    make_token,
    terminate_tree,
)
from hypha_worker.executors.process.spawn import SpawnedProcess, signal_status, spawn
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings
from hypha_worker.hardware.devices import visibility_variables
from hypha_worker.hardware.usage import measure_usage
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.leasing.retention import FindProcesses
from hypha_worker.logs.run_log import RunLog
from hypha_worker.tasks.execution import ExecutionTrace

_log = logging.getLogger(__name__)

_ARGUMENT_LIMIT: Final = 128 << 10
"""Largest number of bytes in one argument (Linux)."""
_OUTPUT_DRAIN: Final = 1.0
"""Seconds in which remaining output is read after the processes have ended."""
_NO_START_FAILURE: Final = (2, os.EX_TEMPFAIL)
"""Exit codes of executors for a job that is not supported, and for exhausted memory."""
_VMSTAT: Final = Path("/proc/vmstat")
_RUNNING: Final = instrumentation.UpDownCounter("hypha.worker.executors.active", "{executor}", "Executors that run.")
_EXITS: Final = instrumentation.Counter(
    "hypha.worker.executors.ended", "{executor}", "Executors that ended, by exit code."
)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs, and under which names it is reported."""

    work_dir: Path
    """Its working directory."""
    allocation: Allocation
    """What its lease has allocated: the number of its threads, and its devices."""
    storage: int
    """Bytes that it may store."""
    scope: anyio.CancelScope
    """Cancelled when the process is to end. A cancellation from an outer scope means that the worker shuts down."""
    log_name: str
    """Stands before each of its lines in the worker's log."""
    what: str = "executor"
    """What the process is, in logs and errors."""
    attributes: instrumentation.Attributes = field(default_factory=dict)
    """Attributes of its metrics; no other process that runs at the same time has the same."""
    log: RunLog | None = None
    """File that gets its output."""
    traceparent: str | None = None
    """Span that the process's own spans belong to."""
    keep_resources: Callable[[FindProcesses], None] = lambda _find: None
    """Called if processes live on that cannot be ended."""


class ProcessRunner:
    """One run of an executor's command."""

    def __init__(self, settings: ExecutorSection, host: HostSettings, place: ProcessPlace) -> None:
        self._settings = settings
        self._host = host
        self._place = place
        self._token = make_token(place.work_dir.parent)
        self._output = OutputLog(place.log, place.log_name)
        self.pid: int | None = None
        """Id of the process, while it runs."""
        self._exit_code: int | None = None
        self._owns: Callable[[int], bool] = lambda _pid: False
        self._oom_kills = 0
        """Processes that the kernel had ended for want of memory when this one was started."""

    @property
    def trace(self) -> ExecutionTrace:
        """Exit code and last output known so far; a logged error comes first."""
        return ExecutionTrace(self._exit_code, self._output.last_lines(failed=self._exit_code != 0))

    def owns(self, pid: int) -> bool:
        """Return whether a process belongs to the run; from any thread."""
        return self._owns(pid)

    async def run(self, values: Mapping[str, str], on_start: Callable[[], None] = lambda: None) -> None:
        """Run the command to its end, and end what it left running.

        Args:
            values: the value of each placeholder in arguments and environment.
            on_start: called when the process runs.

        Raises:
            ExecutionError: it cannot be started for this job, or its exit code is not 0.
            ExecutorExitError: its exit code is not 0, and it has ended by itself: by no signal or layer of isolation,
                and with none of the codes for a fault of the job or a lack of memory.
            ExecutorStartError: it cannot be started at all.
            WorkReturnedError: it exited with `os.EX_IOERR`, which asks for the work to be done elsewhere.
        """
        if job := values.get(JOB_JSON):
            self._output.hide(job)
        async with self._host.stack.confine(self._confinement(values)) as confined:
            await self._run_confined(confined, values, on_start)
            self._check_exit_code(confined)  # while the layers know why it ended

    async def _run_confined(
        self, confined: ConfinedRun, values: Mapping[str, str], on_start: Callable[[], None]
    ) -> None:
        process = await self._start(confined, values)
        self._owns = partial(is_in_run, leader=process.pid, killer=confined)
        reading = anyio.CancelScope(shield=True)  # a process that is being ended may still write output
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_output, process, reading)
            if instrumentation.enabled():
                devices = [device.index for device in self._place.allocation.devices]
                tasks.start_soon(measure_usage, process.pid, self._place.attributes, devices)
            _RUNNING.add(1)
            try:
                self.pid = process.pid
                on_start()
                await process.wait()
            finally:
                self.pid = None
                tasks.cancel_scope.cancel()  # the measurement; what follows is shielded
                await self._terminate(process, confined)
                reading.deadline = anyio.current_time() + _OUTPUT_DRAIN
        process.close()

    async def _terminate(self, process: SpawnedProcess, confined: ConfinedRun) -> None:
        """End the process, if it still runs, and what it left running."""
        grace = TERM_GRACE if self._place.scope.cancel_called else SHUTDOWN_GRACE
        survivors = await terminate_tree(process, self._token, confined, grace, KILL_GRACE)
        if survivors is not None:
            self._place.keep_resources(survivors.pids)
        self._exit_code = process.returncode
        _RUNNING.add(-1)
        _EXITS.add(1, {"process.exit.code": str(process.returncode)})

    def _check_exit_code(self, confined: ConfinedRun) -> None:
        how = exit_text(self._exit_code)
        reason = confined.describe_end(self._exit_code) if self._exit_code else None
        if reason is not None:
            how = reason
        elif self._exit_code == -signal.SIGKILL and count_oom_kills() > self._oom_kills:
            how = f"{how}, while this machine ended processes because it had no memory left"
        what = f"{self._place.what} {self._settings.cmd} {how}"
        _log.info("[%s] %s %s", self._place.log_name, self._place.what, how)
        if self._exit_code == os.EX_IOERR:
            raise WorkReturnedError(self._output.error or what)
        if self._exit_code != 0:
            raise (ExecutorExitError if reason is None and _is_start_failure(self._exit_code) else ExecutionError)(what)

    async def _start(self, confined: ConfinedRun, values: Mapping[str, str]) -> SpawnedProcess:
        command = self._command(values)
        launch = Launch(command, self._environment(values))
        confined.apply(launch)
        self._oom_kills = count_oom_kills()
        try:
            return await spawn(launch, self._place.work_dir, self._host.fork_server)
        except OSError as error:
            kind = ExecutionError if error.errno == errno.E2BIG else ExecutorStartError  # the job may be too large
            raise kind(f"{self._place.what} {self._settings.cmd} cannot be started: {error.strerror}") from error

    def _command(self, values: Mapping[str, str]) -> list[str]:
        command = [self._executable(), *(substitute(arg, values) for arg in self._settings.args)]
        for argument in command:
            if len(os.fsencode(argument)) >= _ARGUMENT_LIMIT:
                raise ExecutionError("the job's spec is too long for an argument: use {JOB_FILE} instead of {JOB_JSON}")
        return command

    def _environment(self, values: Mapping[str, str]) -> dict[str, str]:
        settings, place = self._settings, self._place
        own = {name: substitute(value, values) for name, value in settings.env.items()}
        devices = visibility_variables(place.allocation.visible_devices) if self._host.has_devices else {}
        trace = {"TRACEPARENT": place.traceparent} if place.traceparent else {}
        base = base_environment(place.work_dir, place.allocation.resources, settings.writable)
        return {**base, **own, **devices, **trace, TOKEN_VARIABLE: self._token}

    def _confinement(self, values: Mapping[str, str]) -> Confinement:
        """Return what the process may use; create its folder for temporary files, and missing writable folders."""
        settings, place = self._settings, self._place
        for path in settings.writable:
            _make_writable_folder(path)
        (place.work_dir / TEMPORARY_FOLDER).mkdir(mode=0o700, exist_ok=True)
        named = configured_paths([*settings.args, *settings.env.values()], settings.writable)
        program = program_paths(Path(self._executable()), settings.writable)
        found = [*program, *without_ancestors(named, self._host.stack.private)]
        return Confinement(
            name=f"{place.work_dir.name}-{self._token[:8]}",
            work_dir=place.work_dir.absolute(),
            socket_path=Path(values[SOCKET_PATH]),
            allocation=place.allocation,
            storage=place.storage,
            network=settings.network,
            readable=(*settings.readable, *not_yet_shown(found, settings.readable)),
            writable=tuple(settings.writable),
        )

    def _executable(self) -> str:
        found = self._settings.find_command()
        if found is None:
            raise ExecutorStartError(f"executor command {self._settings.cmd!r} is not found on this worker's PATH")
        return str(Path(found).absolute())

    async def _read_output(self, process: SpawnedProcess, reading: anyio.CancelScope) -> None:
        with reading:
            await self._output.read(process.stdout)


def _make_writable_folder(path: Path) -> None:
    """Create a folder of an executor's `writable` that is missing.

    Raises:
        ExecutionError: it cannot be created.
    """
    try:
        if not path.exists():
            path.mkdir(mode=0o755, parents=True)
    except OSError as error:
        raise ExecutorStartError(
            f"executors.writable: {path} cannot be created: {error.strerror}; create it, or remove it from writable"
        ) from error


def _is_start_failure(code: int | None) -> bool:
    """Return whether a code, of a process that has not used its bridge yet, means that its start has failed."""
    return code is not None and signal_status(code) > 0 and code not in _NO_START_FAILURE


def count_oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since it started; 0 where it does not say."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:  # there is no procfs, as on macOS
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def exit_text(code: int | None) -> str:
    """Describe an exit code: ``exited with status 3`` or ``was ended by SIGKILL``."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"exited with status {code}"
