"""Limits by control groups of version 1, which a worker that runs as root may make. Called by `cgroup`."""

from __future__ import annotations

import os
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


class CgroupV1:
    """Makes groups below this process's own, so that limits on the worker itself also hold for its jobs."""

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
        return tuple(name for name in (*_NEEDED, *_WANTED) if name in self._parents)

    def create(self, name: str, limits: Limits) -> Group:
        """Make the group of a run.

        Raises:
            OSError: it cannot be made; nothing of it is left.
        """
        group = Group({controller: parent / name for controller, parent in self._parents.items()}, limits)
        try:
            for folder in group.folders.values():
                folder.mkdir()
            self._set_limits(group)
        except OSError:
            group.remove(0)
            raise
        return group

    def _set_limits(self, group: Group) -> None:
        folders, limits = group.folders, group.limits
        (folders["pids"] / "pids.max").write_text(str(limits.processes))
        if limits.memory is not None:
            (folders["memory"] / "memory.limit_in_bytes").write_text(str(limits.memory))
            with_swap = folders["memory"] / "memory.memsw.limit_in_bytes"
            if with_swap.exists():  # kernels without swap accounting have none
                with_swap.write_text(str(limits.memory))
        if limits.cpu_quota is not None and "cpu" in folders:
            (folders["cpu"] / "cpu.cfs_period_us").write_text(str(CPU_PERIOD))
            (folders["cpu"] / "cpu.cfs_quota_us").write_text(str(limits.cpu_quota))
