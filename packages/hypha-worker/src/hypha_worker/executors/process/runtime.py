"""The runtime `process`: tasks run as the owner's command.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from hypha_worker.executors.runtimes import ExecutorSection, HostSettings, Runtime
    from hypha_worker.tasks.execution import ExecutionFactory


class ProcessRuntime:
    """Runs each task as a process with a bridge."""

    def suits(self, kind: str) -> bool:
        """See `Runtime.suits`."""
        return kind != "aggregate"

    def check(self, settings: ExecutorSection) -> None:
        """See `Runtime.check`."""
        if not settings.cmd:
            raise ValueError("cmd is missing: a process needs a command")

    def make_factory(self, settings: ExecutorSection, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.process.process_execution import ProcessExecution

        return partial(ProcessExecution, settings=settings, host=host)

    async def find_fault(self, settings: ExecutorSection, host: HostSettings, work_dir: Path) -> str | None:
        """See `Runtime.find_fault`."""
        from hypha_worker.executors.process.executor_check import find_fault

        return await find_fault(settings, host, work_dir)

    def preload(self) -> None:
        """See `Runtime.preload`."""
        from hypha_worker.bridge.server import preload

        preload()


RUNTIME: Final[Runtime] = ProcessRuntime()
