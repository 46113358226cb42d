"""The layer `cgroup`: memory, processes and processor time of a run are limited to its lease, and it ends as a whole.

Uses the first variant that works: a delegated group of version 2, a scope of systemd, or groups of version 1. The
kernel's ``cgroup-v2.rst`` describes delegation, and why a worker moves to a child of its group before it makes others
there ("No Internal Process Constraint").
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import anyio

from hypha_proto.texts import one_line
from hypha_worker.executors.isolation.cgroup_files import Group, remove_empty
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer, in_own_thread
from hypha_worker.executors.isolation.limits import CPU_PERIOD, RunLimits
from hypha_worker.hardware.control_groups import find_mounts, find_own_groups
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
_NEEDED: Final = ("memory", "pids")
_WANTED: Final = ("cpu",)
_SYSTEMD: Final = Path("/run/systemd/system")
_DELEGATED: Final = ("trusted.delegate", "user.delegate")
"""Attributes by which systemd marks the groups that are not its own any more."""
_RUNTIME_FOLDER: Final = "XDG_RUNTIME_DIR"
_STOP_TIMEOUT: Final = 10.0
_Variant: TypeAlias = "CgroupV2 | SystemdScopes | CgroupV1"
"""Each has a `title`, the controllers that limit a run, and makes groups once it is prepared."""


class CgroupLayer(Layer):
    """See the module."""

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
        """See `Layer.probe`."""
        reasons = []
        for variant in self._variants:
            reason = variant.prepare() or self._try(variant)
            if reason is None:
                self._chosen = variant
                limited = ", ".join(_TITLES[name] for name in variant.limited)
                text = f"limits {limited} to those of the lease ({variant.title})"
                return Finding(True, text, tuple(variant.limited))
            reasons.append(reason)
        remedy = "as a systemd service with Delegate=yes" if _SYSTEMD.exists() else "where it may write its own cgroup"
        return Finding(False, f"{'; '.join(reasons)}: run the worker {remedy}")

    def _try(self, variant: _Variant) -> str | None:
        """Let a process join a group; return why this fails, or None."""
        if isinstance(variant, SystemdScopes):
            return None  # which was tried when it was prepared
        try:
            group = variant.create(f"{self._prefix}trial-{os.getpid()}", RunLimits(64 << 20, 16, 1.0))
            try:
                command = ["/bin/sh", "-c", _JOIN, "sh", *map(str, group.procs)]
                done = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT, check=False)
            finally:
                group.remove(_REMOVAL_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{variant.title}: {error}"
        return None if done.returncode == 0 else f"{variant.title}: {done.stderr.decode(errors='replace').strip()}"

    def confine(self, confinement: Confinement) -> AbstractAsyncContextManager[Confined]:
        """See `Layer.confine`.

        Raises:
            OSError: the group cannot be made.
        """
        return self._confine(f"{self._prefix}{confinement.name}", RunLimits.of(confinement.allocation))

    @asynccontextmanager
    async def _confine(self, name: str, limits: RunLimits) -> AsyncIterator[Confined]:
        if self._chosen is None:
            raise OSError("cgroups were not found to work here")
        group = await in_own_thread(partial(self._chosen.create, name, limits))
        try:
            yield group
        finally:
            with anyio.CancelScope(shield=True):
                if left := await in_own_thread(partial(group.remove, _REMOVAL_TIMEOUT)):
                    _log.warning("cgroup %s stays, processes in it cannot be ended: %s", left[0], list(group.pids()))

    def sweep(self) -> None:
        """See `Layer.sweep`. Also removes old groups without processes that other work directories' workers left."""
        _stop_scopes(f"{self._prefix}*")
        found = list(_find_groups())
        own = [folder for folder in found if folder.name.startswith(self._prefix)]
        for folder in set(found) - set(own):
            if _is_old(folder):
                _remove_old(folder)
        left_groups = [Group({_kind(folder): folder}, RunLimits(None, 0, None)) for folder in own]
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
    """Return the key of a group in `Group.folders`: that of version 2, of the freezer, or another."""
    files = {"cgroup.kill": "", "freezer.state": "freezer"}
    return next((kind for file, kind in files.items() if (folder / file).exists()), "other")


# ------------------------------------------------------------------------------------------------------------ version 2


def _usable(controllers: Collection[str]) -> tuple[str, ...]:
    """Return those of some controllers that limit a run."""
    return tuple(name for name in (*_NEEDED, *_WANTED) if name in controllers)


class CgroupV2:
    """Makes groups below the worker's own one of version 2, if that is delegated to it."""

    title = "cgroup v2"

    def __init__(self, own_name: str, own: Path | None = None) -> None:
        """Prepare.

        Args:
            own_name: name of the group that the worker itself moves to.
            own: folder of the delegated group, by default this process's.
        """
        self._own_name = own_name
        self._own = own
        self.limited: tuple[str, ...] = ()
        """The controllers that limit a run."""

    def prepare(self) -> str | None:
        """Take over the delegated group; return why it cannot be used, or None."""
        if self.limited:
            return None
        own = self._own or find_own_groups(find_mounts()).get("")
        if own is None or not _is_delegated(own):
            return "no group of cgroup v2 is delegated to this worker"
        offered = (own / "cgroup.controllers").read_text().split()
        if lacking := [name for name in _NEEDED if name not in offered]:
            return f"the group {own} of cgroup v2 has no controllers for {' and '.join(lacking)}"
        limited = _usable(offered)
        try:
            _enable(own, self._own_name, limited)
        except OSError as error:
            return f"the group {own} cannot be divided, other processes may be in it: {error.strerror}"
        self._own, self.limited = own, limited
        return None

    def create(self, name: str, limits: RunLimits) -> Group:
        """Make the group of a run; see `Group.create`."""
        assert self._own is not None
        settings: list[tuple[str, str, object]] = [("", "pids.max", limits.processes)]
        if limits.memory is not None:
            settings += [("", "memory.max", limits.memory), ("", "memory.oom.group", 1), ("", "memory.swap.max", 0)]
        if limits.cpu_quota is not None and "cpu" in self.limited:
            settings.append(("", "cpu.max", f"{limits.cpu_quota} {CPU_PERIOD}"))
        return Group.create({"": self._own}, name, limits, settings)


def _is_delegated(own: Path) -> bool:
    """Return whether a group is this process's to divide. For root, all are writable, and most are systemd's."""
    if not os.access(own / "cgroup.subtree_control", os.W_OK) or not os.access(own / "cgroup.procs", os.W_OK):
        return False
    if os.geteuid() != 0 or not _SYSTEMD.exists():
        return True
    for name in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(own, name) == b"1":
                return True
    return False


def _enable(own: Path, own_name: str, controllers: tuple[str, ...]) -> None:
    """Move this process to a child of the group, and let the children have limits; undo the former on failure."""
    wanted = " ".join(f"+{name}" for name in controllers)
    child = own / own_name
    child.mkdir(exist_ok=True)
    (child / "cgroup.procs").write_text("0")
    try:
        (own / "cgroup.subtree_control").write_text(wanted)
    except OSError:
        (own / "cgroup.procs").write_text("0")
        child.rmdir()
        raise


# ---------------------------------------------------------------------------------------------------- scopes of systemd


class SystemdScopes:
    """Makes a transient scope for each run, of the user's own manager or, for root, of the system's.

    ``systemd-run --scope`` makes the scope and then becomes the command, so that the process keeps its id; see
    systemd-run(1) and systemd.resource-control(5).
    """

    title = "systemd scopes"
    limited = ("memory", "pids", "cpu")

    def prepare(self) -> str | None:
        """Make a scope as a trial; return why it cannot be made, or None."""
        if not _SYSTEMD.exists() or shutil.which("systemd-run") is None:
            return "systemd does not run here"
        trial = _command(f"hypha-trial-{os.getpid()}", RunLimits(64 << 20, 16, 1.0))
        try:
            done = subprocess.run(
                [*trial, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"systemd-run failed: {error}"
        if done.returncode != 0:
            return f"systemd-run failed: {one_line(done.stderr.decode(errors='replace'), 200)}"
        return None

    def create(self, name: str, limits: RunLimits) -> ScopedGroup:
        """Describe the scope of a run, which its process makes itself."""
        return ScopedGroup(name, limits)


class ScopedGroup(Group):
    """The scope of one run, which systemd removes when it is empty."""

    def __init__(self, name: str, limits: RunLimits) -> None:
        """Describe the scope, which the run's process makes."""
        super().__init__({}, limits)
        self._name = name

    @property
    def folders(self) -> Mapping[str, Path]:
        """Its folder, found by its name once the process has made it; none before."""
        if not self._folders and (found := next(_find_scopes(f"{self._name}.scope"), None)) is not None:
            self._folders = {"": found}
        return self._folders

    def apply(self, launch: Launch) -> None:
        """Let the process make its scope. The command does not inherit the path of the bus."""
        launch.command[:0] = [*_command(self._name, self._limits), "env", "-u", _RUNTIME_FOLDER]
        launch.env.update(_bus())

    def kill(self) -> bool:
        """See `Confined.kill`: it cannot before there is a scope."""
        return bool(self.folders) and super().kill()


def _stop_scopes(pattern: str) -> None:
    """Kill everything in the scopes that match a pattern; a failure is logged only."""
    if not _SYSTEMD.exists() or shutil.which("systemctl") is None:
        return
    command = ["systemctl", *_manager(), "kill", "--signal=KILL", f"{pattern}.scope"]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_STOP_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("scopes of systemd that a killed worker has left may remain: %s", error)


def _find_scopes(name: str) -> Iterator[Path]:
    for mount in find_mounts():
        if not mount.controllers:
            yield from mount.folder.glob(f"**/{name}")


def _command(name: str, limits: RunLimits) -> list[str]:
    properties = {"TasksMax": str(limits.processes)}
    if limits.memory is not None:
        properties |= {"MemoryMax": str(limits.memory), "MemorySwapMax": "0"}
    if limits.cpu is not None:
        properties["CPUQuota"] = f"{max(1, round(100 * limits.cpu))}%"
    settings = [f"--property={key}={value}" for key, value in properties.items()]
    return ["systemd-run", *_manager(), "--scope", "--quiet", "--collect", f"--unit={name}", *settings, "--"]


def _manager() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user"]


def _bus() -> Mapping[str, str]:
    """Return the variable by which the user's manager is found."""
    return {} if os.geteuid() == 0 else {_RUNTIME_FOLDER: os.environ.get(_RUNTIME_FOLDER, f"/run/user/{os.getuid()}")}


# ------------------------------------------------------------------------------------------------------------ version 1


class CgroupV1:
    """Makes groups of version 1 below this process's own: limits on the worker itself also hold for its jobs."""

    title = "cgroup v1"

    def __init__(self) -> None:
        self._parents: dict[str, Path] = {}

    def prepare(self) -> str | None:
        """Find where groups can be made; return why they cannot, or None."""
        own = {name: folder for name, folder in find_own_groups(find_mounts()).items() if os.access(folder, os.W_OK)}
        lacking = [name for name in _NEEDED if name not in own]
        if lacking:
            return f"no hierarchy of cgroup v1 is writable for {' and '.join(lacking)}"
        # version 2 ends a group with one write even where it limits nothing
        ending = "" if "" in own else "freezer"
        self._parents = {name: own[name] for name in (*_NEEDED, *_WANTED, ending) if name in own}
        return None

    @property
    def limited(self) -> tuple[str, ...]:
        """The controllers that limit a run."""
        return _usable(self._parents)

    def create(self, name: str, limits: RunLimits) -> Group:
        """Make the group of a run; see `Group.create`."""
        settings: list[tuple[str, str, object]] = [("pids", "pids.max", limits.processes)]
        if limits.memory is not None:
            files = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            settings += [("memory", file, limits.memory) for file in files]
        if limits.cpu_quota is not None and "cpu" in self._parents:
            settings += [("cpu", "cpu.cfs_period_us", CPU_PERIOD), ("cpu", "cpu.cfs_quota_us", limits.cpu_quota)]
        return Group.create(self._parents, name, limits, settings)
