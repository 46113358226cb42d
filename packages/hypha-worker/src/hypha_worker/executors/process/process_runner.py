"""Runs one command as a process: placeholders, environment, output, measurement, and the end of its process tree.

Called by the executions of this folder, which know what the command is for; it knows neither jobs nor tasks. When
`ProcessRunner.run` returns, `process_tree` has ended the process and every descendant that it can find.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.errors import ExecutionError, WorkReturnedError, is_disk_fault
from hypha_worker.executors.process.process_tree import (
    KILL_GRACE,
    KILL_TIMEOUT,
    SHUTDOWN_GRACE,
    TERM_GRACE,
    TOKEN_VARIABLE,
    terminate_tree,
)
from hypha_worker.hardware.usage import measure_usage
from hypha_worker.jobs.execution import ExecutionTrace
from hypha_worker.leasing.capacity import Allocation

_log = logging.getLogger(__name__)

JOB_JSON: Final = "{JOB_JSON}"
"""Placeholder whose value is replaced by its name wherever the output of the process shows it."""
LAST_LINES: Final = 40
"""Number of a process's last output lines in the report of its end."""
_LINE_LIMIT: Final = 4096
_ERROR_LINE: Final = re.compile(r"(ERROR|CRITICAL) [\w.]+: ")
"""Start of a line that an executor logs as an error; reported first, as a launcher's traceback may follow it."""
_LOG_LIMIT: Final = 64 << 20
_ARGUMENT_LIMIT: Final = 128 << 10
"""Largest number of bytes in one argument (Linux)."""
_OUTPUT_DRAIN: Final = 1.0
"""Seconds in which remaining output is read after the processes have ended."""
_RUNNING: Final = instrumentation.UpDownCounter("hypha.worker.executors.active", "{executor}", "Executors that run.")
_EXITS: Final = instrumentation.Counter(
    "hypha.worker.executors.ended", "{executor}", "Executors that ended, by exit code."
)
_DEVICE_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How an executor is started, from the owner's configuration."""

    cmd: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    access: AccessPolicy = field(default_factory=AccessPolicy)
    socket_folder: Path = Path("/tmp")
    """Where sockets are created; its path is short."""
    has_devices: bool = False
    """Whether the configuration lists GPUs, so that a job sees only those of its lease."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs, and under which names it is reported."""

    work_dir: Path
    """Its working directory, which also gets the log of its output."""
    allocation: Allocation
    """What its lease has allocated: the number of its threads, and its devices."""
    scope: anyio.CancelScope
    """Cancelled when the process is to end. A cancellation from an outer scope means that the worker shuts down."""
    log_name: str
    """Stands before each of its lines in the worker's log."""
    attributes: instrumentation.Attributes = field(default_factory=dict)
    """Attributes of its metrics; no other process that runs at the same time has the same."""
    traceparent: str | None = None
    """Span that the process's own spans belong to."""


class ProcessRunner:
    """One run of an executor's command."""

    def __init__(self, settings: ProcessSettings, place: ProcessPlace) -> None:
        self._settings = settings
        self._place = place
        self._token = secrets.token_hex(16)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._error: str | None = None
        self._hidden: tuple[str, ...] = ()
        self._exit_code: int | None = None

    @property
    def trace(self) -> ExecutionTrace:
        """Exit code and last output known so far; a logged error comes first."""
        if self._exit_code == 0 or self._error is None:
            return ExecutionTrace(self._exit_code, tuple(self._lines))
        others = [line for line in self._lines if line != self._error]
        return ExecutionTrace(self._exit_code, (self._error, *others[1 - LAST_LINES :]))

    async def run(self, values: Mapping[str, str], on_start: Callable[[], None] = lambda: None) -> None:
        """Run the command to its end, and end what it left running.

        Args:
            values: the value of each placeholder in arguments and environment.
            on_start: called when the process runs.

        Raises:
            ExecutionError: it cannot be started, or its exit code is not 0.
            WorkReturnedError: it exited with `os.EX_IOERR`, which asks for the work to be done elsewhere.
        """
        if job := values.get(JOB_JSON):
            self._hidden = (job, repr(job)[1:-1])
        process = await self._start(values)
        reading = anyio.CancelScope(shield=True)  # a process that is being ended may still write output
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_output, process, reading)
            measuring = self._start_measuring(process.pid, tasks)
            try:
                on_start()
                await process.wait()
            finally:
                measuring.cancel()
                await self._terminate(process)
                reading.deadline = anyio.current_time() + _OUTPUT_DRAIN
        with anyio.CancelScope(shield=True):
            await process.aclose()
        self._check_exit_code()

    async def _terminate(self, process: anyio.abc.Process) -> None:
        """End the process, if it still runs, and what it left running."""
        waits = (TERM_GRACE, KILL_TIMEOUT) if self._place.scope.cancel_called else (SHUTDOWN_GRACE, KILL_GRACE)
        await terminate_tree(process, self._token, *waits)
        self._exit_code = process.returncode
        _RUNNING.add(-1)
        _EXITS.add(1, {"process.exit.code": str(process.returncode)})

    def _check_exit_code(self) -> None:
        what = f"executor {self._settings.cmd} {exit_text(self._exit_code)}"
        _log.info("[%s] executor %s", self._place.log_name, exit_text(self._exit_code))
        if self._exit_code == os.EX_IOERR:
            raise WorkReturnedError(self._error or what)
        if self._exit_code != 0:
            raise ExecutionError(what)

    def _start_measuring(self, pid: int, tasks: anyio.abc.TaskGroup) -> anyio.CancelScope:
        """Start measuring the process's use, if metrics are exported; cancel the returned scope to stop."""
        scope = anyio.CancelScope()
        _RUNNING.add(1)
        if instrumentation.enabled():
            devices = [device.index for device in self._place.allocation.devices]

            async def measure() -> None:
                with scope:
                    await measure_usage(pid, self._place.attributes, devices)

            tasks.start_soon(measure)
        return scope

    async def _start(self, values: Mapping[str, str]) -> anyio.abc.Process:
        command = [self._executable(), *(substitute(arg, values) for arg in self._settings.args)]
        for argument in command:
            if len(os.fsencode(argument)) >= _ARGUMENT_LIMIT:
                raise ExecutionError("the job's spec is too long for an argument: use {JOB_FILE} instead of {JOB_JSON}")
        try:
            return await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                cwd=self._place.work_dir,
                env=self._environment(values),
                start_new_session=True,
            )
        except OSError as error:
            raise ExecutionError(f"executor {self._settings.cmd} cannot be started: {error.strerror}") from error

    def _executable(self) -> str:
        path = self._settings.env.get("PATH", os.environ.get("PATH"))
        found = shutil.which(self._settings.cmd, path=path)
        if found is None:
            raise ExecutionError(f"executor command {self._settings.cmd!r} is not found on this worker's PATH")
        return str(Path(found).absolute())

    def _environment(self, values: Mapping[str, str]) -> dict[str, str]:
        allocation, traceparent = self._place.allocation, self._place.traceparent
        configured = {name: substitute(value, values) for name, value in self._settings.env.items()}
        threads = {"OMP_NUM_THREADS": str(max(1, int(allocation.resources.cpu)))}
        devices: dict[str, str] = {}
        if self._settings.has_devices:
            devices = dict.fromkeys(_DEVICE_VARIABLES, ",".join(str(device.index) for device in allocation.devices))
            devices["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's default differs
        trace = {"TRACEPARENT": traceparent} if traceparent else {}
        return {**threads, **os.environ, **configured, **devices, **trace, TOKEN_VARIABLE: self._token}

    async def _read_output(self, process: anyio.abc.Process, reading: anyio.CancelScope) -> None:
        """Read the process's output: write it to a bounded file, log each line, and remember the last ones."""
        assert process.stdout is not None
        with reading, (self._place.work_dir / "executor.log").open("wb", buffering=0) as file:
            pending = b""
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while True:
                    *lines, pending = (pending + await process.stdout.receive(65536)).split(b"\n")
                    for line in lines:
                        self._record_line(file, line)
                    if len(pending) > _LINE_LIMIT:  # progress bars end lines with a carriage return
                        self._record_line(file, pending)
                        pending = b""
            if pending:
                self._record_line(file, pending)

    def _record_line(self, file: FileIO, line: bytes) -> None:
        _append_line(file, line)
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        for job in self._hidden:  # a launcher that failed prints its command, with the whole spec
            text = text.replace(job, JOB_JSON)
        text = text[:_LINE_LIMIT]
        if text:
            if _ERROR_LINE.match(text):
                self._error = text
            self._lines.append(text)
            _log.info("[%s] %s", self._place.log_name, text, extra={"unlimited": True})


def _append_line(file: FileIO, line: bytes) -> None:
    """Append a line to the process's log file; on a full disk the line is in the worker's log only."""
    try:
        if file.tell() < _LOG_LIMIT:
            file.write(line + b"\n")
    except OSError as error:
        if not is_disk_fault(error):
            raise


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder by its value; placeholders inside values are not replaced."""
    names: Sequence[str] = sorted(values, key=text.find)
    first = next((name for name in names if name in text), None)
    if first is None:
        return text
    before, after = text.split(first, 1)
    return before + values[first] + substitute(after, values)


def exit_text(code: int | None) -> str:
    """Describe an exit code: ``exited with status 3`` or ``was ended by SIGKILL``."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"exited with status {code}"
