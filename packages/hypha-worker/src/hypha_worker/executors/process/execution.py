"""Runs a job as a process, by the owner's configured command, with a bridge to the network on a Unix socket.

Called by `jobs.job_manager`. The process, such as `hypha.accelerate_executor`, communicates with `bridge` only. When
`run` returns, `process_tree` has ended the process and every descendant that it can find.
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
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.codec import to_json
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec
from hypha_proto.transfer import OUTER_UPDATE, PushHeader, Refusal
from hypha_worker.bridge.backend import JobBridgeBackend
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.bridge.server import open_bridge
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import ExecutionError, WorkReturnedError, describe_disk_fault, is_disk_fault
from hypha_worker.executors.process.process_tree import (
    KILL_GRACE,
    KILL_TIMEOUT,
    SHUTDOWN_GRACE,
    TERM_GRACE,
    TOKEN_VARIABLE,
    terminate_tree,
)
from hypha_worker.hardware.usage import measure_usage
from hypha_worker.jobs.execution import ExecutionTrace, JobContext, MessageHandler
from hypha_worker.jobs.references import reference_peers, without_secrets

_log = logging.getLogger(__name__)

LAST_LINES: Final = 40
"""Number of an executor's last output lines in the report of its end."""
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


class ProcessExecution:
    """An `Execution` in a separate process."""

    def __init__(self, context: JobContext, settings: ProcessSettings) -> None:
        self._context = context
        self._settings = settings
        self._token = secrets.token_hex(16)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._error: str | None = None
        self._job_json: tuple[str, ...] = ()
        self._exit_code: int | None = None
        self._disk_fault: str | None = None
        self._stopped = anyio.CancelScope()
        self._queue = DeliveryQueue(
            job_id=context.spec.job_id,
            work_dir=context.work_dir,
            senders=reference_peers([context.spec.executor.config.results]),
            storage=context.storage,
            kind=self.accepted_push_kind,
            on_disk_error=self._stop_for_disk_error,
        )

    @property
    def senders(self) -> Set[PeerId]:
        """See `Execution.senders`."""
        return self._queue.senders

    @property
    def accepted_push_kind(self) -> str:
        """See `Execution.accepted_push_kind`."""
        return OUTER_UPDATE

    @property
    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """See `Execution.message_handlers`."""
        return {}

    @property
    def trace(self) -> ExecutionTrace:
        """See `Execution.trace`."""
        if self._exit_code == 0 or self._error is None:
            return ExecutionTrace(self._exit_code, tuple(self._lines))
        others = [line for line in self._lines if line != self._error]
        return ExecutionTrace(self._exit_code, (self._error, *others[1 - LAST_LINES :]))

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """See `Execution.accept_push`."""
        return self._queue.accept(peer, header)

    async def run(self) -> None:
        """See `Execution.run`."""
        socket_path = self._settings.socket_folder / f"{secrets.token_hex(4)}.sock"
        backend = self._make_backend()
        async with open_bridge(backend, socket_path):
            try:
                await self._run_until_disk_fault(socket_path)
            finally:
                self._queue.close()
                backend.close()

    async def _run_until_disk_fault(self, socket_path: Path) -> None:
        with self._stopped:
            try:
                await self._run_process(socket_path)
            except ExecutionError:
                if self._disk_fault is None:
                    raise
        if self._disk_fault is not None:
            raise WorkReturnedError(self._disk_fault)

    def _stop_for_disk_error(self, error: NoSpaceError | OSError) -> None:
        if isinstance(error, NoSpaceError):
            self._stop_for_disk_fault(str(error))
        elif is_disk_fault(error):
            self._stop_for_disk_fault(describe_disk_fault(error, self._context.work_dir))

    def _stop_for_disk_fault(self, reason: str) -> None:
        self._disk_fault = self._disk_fault or reason
        self._stopped.cancel()

    @property
    def _log_name(self) -> str:
        """The beginnings of the ids of job and lease, since several tasks of a job may run here."""
        return f"{self._context.spec.job_id!s:.8}/{self._context.lease!s:.4}"

    def _make_backend(self) -> JobBridgeBackend:
        context = self._context
        return JobBridgeBackend(
            endpoint=context.endpoint,
            spec=context.spec,
            lease=context.lease,
            scheduler=context.scheduler,
            work_dir=context.work_dir,
            queue=self._queue,
            access=self._settings.access,
            files=PeerFiles(context.endpoint, context.storage, context.traffic),
            traceparent=context.traceparent,
            on_disk_fault=self._stop_for_disk_fault,
        )

    async def _run_process(self, socket_path: Path) -> None:
        values = placeholder_values(self._context.spec, self._context.work_dir, socket_path)
        self._job_json = (values["{JOB_JSON}"], repr(values["{JOB_JSON}"])[1:-1])
        process = await self._start(values)
        reading = anyio.CancelScope(shield=True)  # a process that is being ended may still write output
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_output, process, reading)
            measuring = self._start_measuring(process.pid, tasks)
            try:
                await process.wait()
            finally:
                measuring.cancel()
                waits = (
                    (TERM_GRACE, KILL_TIMEOUT) if self._context.scope.cancel_called else (SHUTDOWN_GRACE, KILL_GRACE)
                )
                await terminate_tree(process, self._token, *waits)  # also ends what the process left running
                self._exit_code = process.returncode
                _RUNNING.add(-1)
                _EXITS.add(1, {"process.exit.code": str(process.returncode)})
                reading.deadline = anyio.current_time() + _OUTPUT_DRAIN
        with anyio.CancelScope(shield=True):
            await process.aclose()
        _log.info("[%s] executor %s", self._log_name, exit_text(self._exit_code))
        if self._exit_code == os.EX_IOERR:
            raise WorkReturnedError(self._error or f"executor {self._settings.cmd} {exit_text(self._exit_code)}")
        if self._exit_code != 0:
            raise ExecutionError(f"executor {self._settings.cmd} {exit_text(self._exit_code)}")

    def _start_measuring(self, pid: int, tasks: anyio.abc.TaskGroup) -> anyio.CancelScope:
        """Start measuring the executor's use, if metrics are exported; cancel the returned scope to stop."""
        scope = anyio.CancelScope()
        _RUNNING.add(1)
        if instrumentation.enabled():
            devices = [device.index for device in self._context.allocation.devices]
            about = {"hypha.job.id": str(self._context.spec.job_id), "hypha.lease.id": str(self._context.lease)}

            async def measure() -> None:
                with scope:
                    await measure_usage(pid, about, devices)

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
                cwd=self._context.work_dir,
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
        allocation = self._context.allocation
        configured = {name: substitute(value, values) for name, value in self._settings.env.items()}
        threads = {"OMP_NUM_THREADS": str(max(1, int(allocation.resources.cpu)))}
        devices: dict[str, str] = {}
        if self._settings.has_devices:
            devices = dict.fromkeys(_DEVICE_VARIABLES, ",".join(str(device.index) for device in allocation.devices))
            devices["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order; CUDA's default differs
        trace = {"TRACEPARENT": self._context.traceparent} if self._context.traceparent else {}
        return {**threads, **os.environ, **configured, **devices, **trace, TOKEN_VARIABLE: self._token}

    async def _read_output(self, process: anyio.abc.Process, reading: anyio.CancelScope) -> None:
        """Read the process's output: write it to a bounded file, log each line, and remember the last ones."""
        assert process.stdout is not None
        name = self._log_name
        with reading, (self._context.work_dir / "executor.log").open("wb", buffering=0) as file:
            pending = b""
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while True:
                    *lines, pending = (pending + await process.stdout.receive(65536)).split(b"\n")
                    for line in lines:
                        self._record_line(file, line, name)
                    if len(pending) > _LINE_LIMIT:  # progress bars end lines with a carriage return
                        self._record_line(file, pending, name)
                        pending = b""
            if pending:
                self._record_line(file, pending, name)

    def _record_line(self, file: FileIO, line: bytes, name: str) -> None:
        _append_line(file, line)
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        for job in self._job_json:  # a launcher that failed prints its command, with the whole spec
            text = text.replace(job, "{JOB_JSON}")
        text = text[:_LINE_LIMIT]
        if text:
            if _ERROR_LINE.match(text):
                self._error = text
            self._lines.append(text)
            _log.info("[%s] %s", name, text, extra={"unlimited": True})


def _append_line(file: FileIO, line: bytes) -> None:
    """Append a line to the executor's log file; on a full disk the line is in the worker's log only."""
    try:
        if file.tell() < _LOG_LIMIT:
            file.write(line + b"\n")
    except OSError as error:
        if not is_disk_fault(error):
            raise


def placeholder_values(spec: JobSpec, work_dir: Path, socket_path: Path) -> dict[str, str]:
    """Return the value of each placeholder in arguments and environment; also write the job's file."""
    text = to_json(JobSpec, without_secrets(spec)).decode()
    job_file = work_dir / "job.json"
    job_file.write_text(text)
    return {
        "{SOCKET_PATH}": str(socket_path),
        "{WORK_DIR}": str(work_dir),
        "{JOB_JSON}": text,
        "{JOB_FILE}": str(job_file),
    }


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
