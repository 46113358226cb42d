"""The runtime `parameter-server`: aggregation jobs run in this process.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hypha_proto.offers import ExecutorClass
    from hypha_worker.executors.runtimes import ExecutorSettings, HostSettings, Runtime
    from hypha_worker.jobs.execution import ExecutionFactory, TaskMethod
    from hypha_worker.tasks.execution import TaskExecutionFactory


class ParameterServerRuntime:
    """Runs the built-in parameter server of DiLoCo."""

    job_class: ExecutorClass = "aggregate"
    runs_tasks = False

    @property
    def task_methods(self) -> tuple[TaskMethod[Any, Any], ...]:
        """See `Runtime.task_methods`."""
        from hypha_proto.job_membership import JOB_WORKERS, JobWorkersKnown
        from hypha_proto.round_membership import ROUND_MEMBERS, MembersKnown
        from hypha_worker.jobs.execution import TaskMethod

        return (
            TaskMethod(ROUND_MEMBERS, lambda reason: MembersKnown(accepted=False, reason=reason)),
            TaskMethod(JOB_WORKERS, lambda reason: JobWorkersKnown(accepted=False, reason=reason)),
        )

    def check(self, settings: ExecutorSettings) -> None:
        """See `Runtime.check`."""
        if settings.cmd or settings.args:
            raise ValueError("cmd and args do not belong to the parameter server, which is built in: remove them")
        if settings.env:
            raise ValueError(
                f"env ({', '.join(settings.env)}) does not belong to the parameter server, which is built in and "
                "starts no process: remove it, or set the variables for the worker itself"
            )
        if not settings.network or settings.readable or settings.writable:
            raise ValueError(
                "network, readable and writable do not belong to the parameter server, which is built in and starts no "
                "process: remove them"
            )

    def make_factory(self, settings: ExecutorSettings, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.parameter_server.server import ParameterServer

        return ParameterServer

    def make_task_factory(self, settings: ExecutorSettings, host: HostSettings) -> TaskExecutionFactory:
        """See `Runtime.make_task_factory`."""
        raise ValueError('runtime = "parameter-server" runs no tasks: use runtime = "process"')

    def preload(self) -> None:
        """See `Runtime.preload`."""
        import hypha_proto.outer_step  # noqa: F401


RUNTIME: Final[Runtime] = ParameterServerRuntime()
