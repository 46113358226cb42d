"""The layer `supervisor`: where bubblewrap does not work, `launcher` stays as the parent of the executor's command.

Descendants that are orphaned become its children, also those without the worker's token in sessions of their own. It
kills them when the command has ended, when the worker has ended, and on `SupervisedProcess.kill`. A process that kills
the supervisor itself escapes it; `landlock` refuses that signal from version 6 of its interface on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer


class SupervisorLayer(Layer):
    """See the module."""

    name = "supervisor"

    def probe(self) -> Finding:
        """See `Layer.probe`."""
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


class SupervisedProcess(Confined):
    """The worker's end of the pipe, which the supervisor waits on."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self._writer: int | None = writer

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`."""
        launch.steps["supervisor"] = self._reader
        launch.descriptors.append(self._reader)

    def kill(self) -> bool:
        """Let the supervisor kill all of its descendants."""
        if self._writer is None:
            return False
        os.close(self._writer)
        self._writer = None
        return True

    def close(self) -> None:
        """Release the pipe."""
        self.kill()
        os.close(self._reader)
