"""The layers of this machine in the order in which they are applied, what their probes have found, and a run in them.

A worker makes its stack once, when it starts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypha_worker.errors import ExecutorStartError
from hypha_worker.executors.isolation.bubblewrap import BubblewrapLayer
from hypha_worker.executors.isolation.cgroup import CgroupLayer
from hypha_worker.executors.isolation.landlock import LandlockLayer, SupervisorLayer
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer
from hypha_worker.executors.isolation.limits import RlimitsLayer
from hypha_worker.executors.isolation.own_uid import OwnUidLayer

_log = logging.getLogger(__name__)

DISABLED: Final = "disabled in the configuration"
_IN_PLACE_OF_SANDBOX: Final = frozenset({LandlockLayer.name, SupervisorLayer.name})


@dataclass(frozen=True, slots=True)
class IsolationStack:
    """The working layers, the first one applied first; without any, a process is only started as the worker's user."""

    layers: Sequence[Layer] = ()
    findings: Mapping[str, Finding] = field(default_factory=dict)
    """The finding of every layer by its name, also of those that do not work."""
    private: Sequence[Path] = ()
    """Files and folders of the worker that no job may see."""

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[ConfinedRun]:
        """Prepare one run in all layers, and clean up after it.

        Raises:
            ExecutorStartError: a layer cannot be prepared.
        """
        async with AsyncExitStack() as entered:
            yield ConfinedRun([await _enter(layer, confinement, entered) for layer in self.layers])

    def sweep(self) -> None:
        """Remove what a killed worker's runs have left."""
        for layer in self.layers:
            layer.sweep()


async def _enter(layer: Layer, confinement: Confinement, entered: AsyncExitStack) -> Confined:
    try:
        return await entered.enter_async_context(layer.confine(confinement))
    except OSError as error:
        raise ExecutorStartError(f"the layer {layer.name} cannot be prepared: {error}") from error


@dataclass(frozen=True, slots=True)
class ConfinedRun:
    """One run in all layers, as a `Confined`."""

    parts: Sequence[Confined] = ()

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`."""
        for part in self.parts:
            part.apply(launch)

    def pids(self) -> Sequence[int] | None:
        """Return what the first layer knows that knows them."""
        return next((pids for part in self.parts if (pids := part.pids()) is not None), None)

    def kill(self) -> bool:
        """Let every layer that can kill all processes; return whether there is one."""
        killed = [part.kill() for part in self.parts]  # all of them, not up to the first one that can
        return any(killed)

    def describe_end(self, exit_code: int) -> str | None:
        """Return the first reason that a layer knows."""
        return next((text for part in self.parts if (text := part.describe_end(exit_code)) is not None), None)


def make_stack(work_dir: Path, private: Sequence[Path] = (), disabled: Collection[str] = ()) -> IsolationStack:
    """Return the stack of this machine. Probes block for some hundred milliseconds; results are kept.

    Args:
        work_dir: where the folders of runs will be.
        private: files and folders that no job may see, such as the worker's key.
        disabled: names of layers that are not to be used.
    """
    layers: list[Layer] = [
        OwnUidLayer(work_dir),
        RlimitsLayer(),
        BubblewrapLayer(private),
        LandlockLayer(),
        SupervisorLayer(),
        CgroupLayer(work_dir),  # outermost: systemd-run does not work inside of the others
    ]
    sandbox = Finding(False, DISABLED) if BubblewrapLayer.name in disabled else _probe_bubblewrap()
    findings = {layer.name: _examine(layer, disabled, sandbox) for layer in layers}
    working = [layer for layer in layers if findings[layer.name].works]
    return IsolationStack(working, findings, private)


def _examine(layer: Layer, disabled: Collection[str], sandbox: Finding) -> Finding:
    """Return whether a layer is used: some stand in for the sandbox, and one works inside of it only."""
    if layer.name in disabled:
        return Finding(False, DISABLED)
    if layer.name == BubblewrapLayer.name:
        return sandbox
    if sandbox.works and layer.name in _IN_PLACE_OF_SANDBOX:
        return Finding(False, "not needed: bubblewrap works")
    found = layer.probe()
    if found.works and not sandbox.works and layer.name == OwnUidLayer.name:
        return Finding(False, "it needs the layer bubblewrap")
    return found


@functools.cache
def _probe_bubblewrap() -> Finding:
    return BubblewrapLayer().probe()
