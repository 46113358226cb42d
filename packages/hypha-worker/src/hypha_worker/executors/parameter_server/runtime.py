"""The runtime `parameter-server`: aggregation runs in this process.

Found by `executors.runtimes`, which defines the interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from hypha_worker.executors.runtimes import ExecutorSection, HostSettings, Runtime
    from hypha_worker.tasks.execution import ExecutionFactory


class ParameterServerRuntime:
    """Runs the built-in parameter server of DiLoCo."""

    def suits(self, kind: str) -> bool:
        """See `Runtime.suits`."""
        return kind == "aggregate"

    def check(self, settings: ExecutorSection) -> None:
        """See `Runtime.check`."""
        if settings.cmd or settings.args or settings.check:
            raise ValueError(
                "cmd, args and check do not belong to the parameter server, which is built in: remove them"
            )
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

    def make_factory(self, settings: ExecutorSection, host: HostSettings) -> ExecutionFactory:
        """See `Runtime.make_factory`."""
        from hypha_worker.executors.parameter_server.server import ParameterServer

        return ParameterServer

    async def find_fault(self, settings: ExecutorSection, host: HostSettings, work_dir: Path) -> str | None:
        """See `Runtime.find_fault`: it is built in."""
        return None

    def preload(self) -> None:
        """See `Runtime.preload`."""
        import hypha_proto.outer_step  # noqa: F401


RUNTIME: Final[Runtime] = ParameterServerRuntime()
