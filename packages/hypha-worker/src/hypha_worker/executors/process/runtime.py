"""The runtime `process`: training jobs and tasks run as the owner's command.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hypha_proto.offers import ExecutorClass
    from hypha_worker.executors.runtimes import ExecutorSettings, HostSettings, Runtime
    from hypha_worker.jobs.execution import Execution, ExecutionFactory, JobContext, TaskMethod


class ProcessRuntime:
    """Runs each job as a process with a job bridge."""

    job_class: ExecutorClass = "train"
    runs_tasks = True
    task_methods: tuple[TaskMethod[Any, Any], ...] = ()

    def check(self, settings: ExecutorSettings) -> None:
        """See `Runtime.check`."""
        if not settings.cmd:
            raise ValueError("cmd is missing: a process needs a command")

    def make_factory(self, settings: ExecutorSettings, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.process.execution import ProcessExecution
        from hypha_worker.executors.process.process_runner import ProcessSettings

        process_settings = ProcessSettings(
            cmd=settings.cmd or "",
            args=settings.args,
            env=settings.env,
            access=host.access,
            socket_folder=host.socket_folder,
            has_devices=host.has_devices,
        )

        def make_execution(context: JobContext) -> Execution:
            return ProcessExecution(context, process_settings)

        return make_execution

    def preload(self) -> None:
        """See `Runtime.preload`."""
        from hypha_worker.bridge.server import preload

        preload()


RUNTIME: Final[Runtime] = ProcessRuntime()
