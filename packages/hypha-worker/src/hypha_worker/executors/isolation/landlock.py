"""The layers `landlock` and `supervisor`, where bubblewrap does not work; `launcher` carries out both.

`landlock`: the kernel refuses files, TCP and signals to the processes. It hides nothing: refused files fail with
EACCES.

`supervisor`: the launcher stays as the parent of the executor's command. Descendants that are orphaned become its
children, also those without the worker's token in sessions of their own. It kills them when the command has ended,
when the worker has ended, and on `SupervisedProcess.kill`. A process that kills the supervisor itself escapes it;
`landlock` refuses that signal from version 6 of its interface on.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer
from hypha_worker.executors.isolation.seccomp import seccomp_filter
from hypha_worker.executors.isolation.visible_paths import ETC, SYSTEM_FOLDERS
from hypha_worker.hardware.devices import device_nodes

_LANDLOCK_CREATE_RULESET: Final = 444
_VERSION_FLAG: Final = 1
_WRITABLE: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/shm")
_ABI_NETWORK: Final = 4
_ABI_SCOPES: Final = 6
_FEATURES: Final = {"tcp": _ABI_NETWORK, "signals": _ABI_SCOPES}


class LandlockLayer(Layer):
    """Lets the kernel refuse what a run must not do."""

    name = "landlock"

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        abi = landlock_abi()
        if abi < 1:
            return Finding(False, "this kernel has no Landlock")
        text = f"files outside the job's folder are refused; open: {', '.join(_open_ways(abi))}"
        return Finding(True, text, [name for name, least in _FEATURES.items() if abi >= least])

    def confine(self, confinement: Confinement) -> nullcontext[Confined]:
        """See `Layer.confine`."""
        return nullcontext(LandlockRules(confinement, landlock_abi()))


def _open_ways(abi: int) -> list[str]:
    """Return what a process may still do that the layer does not hold back."""
    ways = ["others' path sockets", "chmod", "UDP", "/dev/shm", "the list of processes"]
    if abi < _ABI_NETWORK:
        ways.append("TCP")
    if abi < _ABI_SCOPES:
        ways.append("signals")
    return ways


@dataclass(frozen=True, slots=True)
class LandlockRules(Confined):
    """The rules of one run."""

    confinement: Confinement
    abi: int

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`."""
        confinement = self.confinement
        nodes = device_nodes(confinement.allocation.visible_devices)
        launch.steps["landlock"] = {
            "abi": self.abi,
            "readable": [*SYSTEM_FOLDERS, *ETC, "/proc", "/sys", *map(str, confinement.readable)],
            "writable": [*_WRITABLE, *map(str, (*nodes, confinement.work_dir, *confinement.writable))],
            "network": confinement.network,
            "seccomp": seccomp_filter(platform.machine(), sees_others=True).hex(),
        }


def landlock_abi() -> int:
    """Return the version of the kernel's interface; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), None, ctypes.c_long(0), _VERSION_FLAG)))


class SupervisorLayer(Layer):
    """Ends the descendants of a run."""

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
