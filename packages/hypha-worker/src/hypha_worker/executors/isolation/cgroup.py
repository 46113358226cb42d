"""The layer `cgroup`: memory, processes and processor time of a run are limited to its lease, and it ends as a whole.

Uses the first variant that works: a delegated group of version 2, a scope of systemd, or groups of version 1.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import anyio
import anyio.to_thread

from hypha_worker.executors.isolation.cgroup_files import Group, Limits, find_mounts, remove_empty
from hypha_worker.executors.isolation.cgroup_v1 import CgroupV1
from hypha_worker.executors.isolation.cgroup_v2 import CgroupV2
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch
from hypha_worker.executors.isolation.systemd_scope import ScopedGroup, SystemdScopes
from hypha_worker.work_dir import work_dir_key

_log = logging.getLogger(__name__)

_REMOVAL_TIMEOUT: Final = 2.0
"""Seconds that processes which are still in a run's group at its end have to end."""
_PROBE_TIMEOUT: Final = 5.0
_OLD: Final = 3600.0
"""Seconds after which a group that still has no process is one that nobody uses."""
_RUN: Final = re.compile(r"hypha-[0-9a-f]{12}\.(?!worker$).+")
_JOIN: Final = 'for file; do echo 0 > "$file" || exit 1; done'
_TITLES: Final = {"memory": "memory", "pids": "processes", "cpu": "processor time"}
T = TypeVar("T")


class _Variant(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def limited(self) -> Sequence[str]: ...

    def prepare(self) -> str | None: ...

    def create(self, name: str, limits: Limits) -> Group | ScopedGroup: ...


class CgroupLayer:
    """Implements `layers.Layer`."""

    name = "cgroup"

    def __init__(self, work_dir: Path) -> None:
        """Prepare.

        Args:
            work_dir: the worker's, whose name the groups carry, so that `sweep` finds them.
        """
        self._prefix = f"hypha-{work_dir_key(work_dir)}."
        self._variants: Sequence[_Variant] = (CgroupV2(f"{self._prefix}worker"), SystemdScopes(), CgroupV1())
        self._chosen: _Variant | None = None

    def probe(self) -> Finding:
        """See `layers.Layer`."""
        reasons = []
        for variant in self._variants:
            reason = variant.prepare() or self._try(variant)
            if reason is None:
                self._chosen = variant
                limited = ", ".join(_TITLES[name] for name in variant.limited)
                text = f"limits {limited} to those of the lease ({variant.title})"
                return Finding(True, text, tuple(variant.limited))
            reasons.append(reason)
        return Finding(False, f"{'; '.join(reasons)}: run the worker as a systemd service with Delegate=yes")

    def _try(self, variant: _Variant) -> str | None:
        """Let a process join a group; return why this fails, or None."""
        if isinstance(variant, SystemdScopes):
            return None  # which was tried when it was prepared
        try:
            group = variant.create(f"{self._prefix}trial-{os.getpid()}", Limits(64 << 20, 16, 1.0))
            assert isinstance(group, Group)
            try:
                command = ["/bin/sh", "-c", _JOIN, "sh", *map(str, group.procs)]
                done = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT, check=False)
            finally:
                group.remove(_REMOVAL_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{variant.title}: {error}"
        return None if done.returncode == 0 else f"{variant.title}: {done.stderr.decode(errors='replace').strip()}"

    def confine(self, confinement: Confinement) -> AbstractAsyncContextManager[Confined]:
        """See `layers.Layer`.

        Raises:
            OSError: the group cannot be made.
        """
        return self._confine(f"{self._prefix}{confinement.name}", Limits.of(confinement.allocation))

    @asynccontextmanager
    async def _confine(self, name: str, limits: Limits) -> AsyncIterator[Confined]:
        if self._chosen is None:
            raise OSError("cgroups were not found to work here")
        group = await _in_own_thread(partial(self._chosen.create, name, limits))
        try:
            yield _ConfinedByGroup(group) if isinstance(group, Group) else group
        finally:
            with anyio.CancelScope(shield=True):
                if left := await _in_own_thread(partial(group.remove, _REMOVAL_TIMEOUT)):
                    _log.warning("cgroup %s stays, processes in it cannot be ended: %s", left[0], list(group.pids()))

    def sweep(self) -> None:
        """See `layers.Layer`. Also removes old groups without processes that other work directories' workers left."""
        SystemdScopes().stop_all(f"{self._prefix}*")
        found = list(_find_groups())
        own = [folder for folder in found if folder.name.startswith(self._prefix)]
        for folder in set(found) - set(own):
            if _is_old(folder):
                _remove_old(folder)
        left_groups = [Group({_kind(folder): folder}, Limits(None, 0, None)) for folder in own]
        deadline = time.monotonic() + _REMOVAL_TIMEOUT
        for group in sorted(left_groups, key=lambda group: "" not in group.folders):
            if pids := group.pids():
                _log.warning("ending processes %s, left by a worker that was killed", ", ".join(map(str, pids)))
            if left := group.remove(max(0.0, deadline - time.monotonic())):
                _log.warning("cgroup %s stays, processes in it cannot be ended", left[0])


def _find_groups() -> Iterator[Path]:
    """Return the groups of runs of all work directories in all hierarchies."""
    for mount in find_mounts():
        for folder, names, _ in os.walk(mount.folder):
            yield from (Path(folder, name) for name in names if _RUN.fullmatch(name))


def _remove_old(folder: Path) -> None:
    try:
        remove_empty(folder)
    except OSError as error:  # another user's, or the hierarchy is mounted read-only
        _log.debug("the old cgroup %s stays: %s", folder, error)


def _is_old(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > _OLD
    except FileNotFoundError:
        return False


def _kind(folder: Path) -> str:
    """Return whether a group can be ended at once, by which hierarchy: that of version 2, the freezer or another."""
    files = {"cgroup.kill": "", "freezer.state": "freezer"}
    return next((kind for file, kind in files.items() if (folder / file).exists()), "other")


class _ConfinedByGroup:
    """A run in a group that was made for it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pids, self.kill, self.describe_end = group.pids, group.kill, group.describe_end

    def apply(self, launch: Launch) -> None:
        """See `layers.Confined`: the launcher joins the group."""
        launch.steps["cgroups"] = [str(file) for file in self._group.procs]


async def _in_own_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread: the end of a run must not wait for other jobs' threads."""
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))
