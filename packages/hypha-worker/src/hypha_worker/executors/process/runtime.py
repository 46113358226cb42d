"""The runtime `process`: training jobs and tasks run as the owner's command.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hypha_proto.offers import ExecutorClass
    from hypha_worker.executors.process.process_runner import ProcessSettings
    from hypha_worker.executors.runtimes import ExecutorSettings, HostSettings, Runtime
    from hypha_worker.jobs.execution import Execution, ExecutionFactory, JobContext, TaskMethod
    from hypha_worker.tasks.execution import TaskContext, TaskExecution, TaskExecutionFactory


class ProcessRuntime:
    """Runs each job as a process with a job bridge."""

    job_class: ExecutorClass = "train"
    runs_tasks = True

    @property
    def task_methods(self) -> tuple[TaskMethod[Any, Any], ...]:
        """See `Runtime.task_methods`."""
        from hypha_proto.job_membership import SERVER_CHANGED, ServerKnown
        from hypha_worker.jobs.execution import TaskMethod

        return (TaskMethod(SERVER_CHANGED, lambda reason: ServerKnown(accepted=False, reason=reason)),)

    def check(self, settings: ExecutorSettings) -> None:
        """See `Runtime.check`."""
        if not settings.cmd:
            raise ValueError("cmd is missing: a process needs a command")

    def make_factory(self, settings: ExecutorSettings, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.process.execution import ProcessExecution

        process_settings = _process_settings(settings, host)

        def make_execution(context: JobContext) -> Execution:
            return ProcessExecution(context, process_settings)

        return make_execution

    def make_task_factory(self, settings: ExecutorSettings, host: HostSettings) -> TaskExecutionFactory:
        """See `Runtime.make_task_factory`."""
        from hypha_worker.executors.process.task_execution import TaskProcess

        process_settings = _process_settings(settings, host)

        def make_execution(context: TaskContext) -> TaskExecution:
            return TaskProcess(context, process_settings)

        return make_execution

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
