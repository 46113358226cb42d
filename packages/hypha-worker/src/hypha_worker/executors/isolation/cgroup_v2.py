"""Limits by control groups of version 2, where the worker's own group is delegated to it. Called by `cgroup`.

See the kernel's ``cgroup-v2.rst``, "Delegation" and "No Internal Process Constraint": before the group may have limited
children, the worker itself moves to a child of it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from hypha_worker.executors.isolation.cgroup_files import (
    CPU_PERIOD,
    Group,
    Limits,
    find_mounts,
    find_own_groups,
)

_NEEDED: Final = ("memory", "pids")
_WANTED: Final = ("cpu",)
_SYSTEMD: Final = Path("/run/systemd/system")
_DELEGATED: Final = ("trusted.delegate", "user.delegate")
"""Attributes by which systemd marks the groups that are not its own any more."""


class CgroupV2:
    """Makes groups below the delegated one."""

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
        limited = tuple(name for name in (*_NEEDED, *_WANTED) if name in offered)
        try:
            _enable(own, self._own_name, limited)
        except OSError as error:
            return f"the group {own} cannot be divided, other processes may be in it: {error.strerror}"
        self._own, self.limited = own, limited
        return None

    def create(self, name: str, limits: Limits) -> Group:
        """Make the group of a run.

        Raises:
            OSError: it cannot be made; nothing of it is left.
        """
        assert self._own is not None
        folder = self._own / name
        group = Group({"": folder}, limits)
        folder.mkdir()
        try:
            for file, value in self._settings(limits).items():
                (folder / file).write_text(value)
            with suppress(FileNotFoundError):  # kernels without swap accounting have none
                (folder / "memory.swap.max").write_text("0" if limits.memory is not None else "max")
        except OSError:
            group.remove(0)
            raise
        return group

    def _settings(self, limits: Limits) -> dict[str, str]:
        values = {"pids.max": str(limits.processes)}
        if limits.memory is not None:
            values |= {"memory.max": str(limits.memory), "memory.oom.group": "1"}
        if limits.cpu_quota is not None and "cpu" in self.limited:
            values["cpu.max"] = f"{limits.cpu_quota} {CPU_PERIOD}"
        return values


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
