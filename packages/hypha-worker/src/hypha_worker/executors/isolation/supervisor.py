"""The layer `supervisor`: where bubblewrap does not work, `launcher` stays as the parent of the executor's command.

Descendants that are orphaned become its children, also those without the worker's token in sessions of their own. It
kills them when the command has ended, when the worker has ended, and on `SupervisedProcess.kill`. A process that kills
the supervisor itself escapes it; `landlock` refuses that signal from version 6 of its interface on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hypha_worker.executors.isolation.layers import Confinement, Finding, Launch


class SupervisorLayer:
    """See the module."""

    name = "supervisor"

    def __init__(self, probe_bubblewrap: Callable[[], Finding]) -> None:
        """Prepare.

        Args:
            probe_bubblewrap: the probe of the layer that makes this one needless.
        """
        self._probe_bubblewrap = probe_bubblewrap

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        if self._probe_bubblewrap().works:
            return Finding(False, "not needed: bubblewrap works")
        if sys.platform != "linux":
            return Finding(False, "it exists on Linux only")
        return Finding(True, "orphaned processes end with their job, and with the worker")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[SupervisedProcess]:
        """See `Layer.confine`."""
        supervised = SupervisedProcess()
        try:
            yield supervised
        finally:
            supervised.close()

    def sweep(self) -> None:
        """The supervisor ends with the worker."""


class SupervisedProcess:
    """The worker's end of the pipe, which the supervisor waits on."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self._writer: int | None = writer

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`."""
        launch.steps["supervisor"] = self._reader
        launch.descriptors.append(self._reader)

    def pids(self) -> None:
        """Return None: the worker finds the processes by their group and token."""
        return

    def kill(self) -> bool:
        """Let the supervisor kill all of its descendants."""
        if self._writer is None:
            return False
        os.close(self._writer)
        self._writer = None
        return True

    def describe_end(self, exit_code: int) -> str | None:
        """Return None: the supervisor ends as the command has."""
        return None

    def close(self) -> None:
        """Release the pipe."""
        self.kill()
        os.close(self._reader)
