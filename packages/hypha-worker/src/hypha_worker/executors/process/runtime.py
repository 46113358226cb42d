"""The runtime `process`: tasks run as the owner's command.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from hypha_worker.executors.process.process_runner import ProcessSettings
    from hypha_worker.executors.runtimes import ExecutorSettings, HostSettings, Runtime
    from hypha_worker.tasks.execution import Execution, ExecutionFactory, TaskContext


class ProcessRuntime:
    """Runs each task as a process with a bridge."""

    def suits(self, kind: str) -> bool:
        """See `Runtime.suits`."""
        return kind != "aggregate"

    def check(self, settings: ExecutorSettings) -> None:
        """See `Runtime.check`."""
        if not settings.cmd:
            raise ValueError("cmd is missing: a process needs a command")

    def make_factory(self, settings: ExecutorSettings, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.process.execution import ProcessExecution

        process_settings = _process_settings(settings, host)

        def make_execution(context: TaskContext) -> Execution:
            return ProcessExecution(context, process_settings)

        return make_execution

    async def find_fault(self, settings: ExecutorSettings, host: HostSettings, work_dir: Path) -> str | None:
        """See `Runtime.find_fault`."""
        from hypha_worker.executors.process.start_check import find_fault

        return await find_fault(_process_settings(settings, host), settings.check, work_dir)

    def preload(self) -> None:
        """See `Runtime.preload`."""
        from hypha_worker.bridge.server import preload

        preload()


def _process_settings(settings: ExecutorSettings, host: HostSettings) -> ProcessSettings:
    from hypha_worker.executors.process.process_runner import ProcessSettings

    return ProcessSettings(
        cmd=settings.cmd or "",
        args=settings.args,
        env=settings.env,
        access=host.access,
        network=settings.network,
        readable=settings.readable,
        writable=settings.writable,
        stack=host.stack,
        socket_folder=host.socket_folder,
        logs=host.logs,
        has_devices=host.has_devices,
        fork_server=host.fork_server,
        starts=host.starts,
    )


RUNTIME: Final[Runtime] = ProcessRuntime()
