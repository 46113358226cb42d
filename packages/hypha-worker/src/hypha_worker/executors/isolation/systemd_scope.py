"""Limits by transient scopes of systemd, for a worker without a control group of its own. Called by `cgroup`.

``systemd-run --scope`` makes the scope and then becomes the command, so that the process keeps its id; see
systemd-run(1) and systemd.resource-control(5).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha_worker.executors.isolation.cgroup_files import Group, Limits, find_mounts
from hypha_worker.executors.isolation.layers import Launch

_log = logging.getLogger(__name__)

_SYSTEMD: Final = Path("/run/systemd/system")
_RUNTIME_FOLDER: Final = "XDG_RUNTIME_DIR"
_PROBE_TIMEOUT: Final = 5.0
_STOP_TIMEOUT: Final = 10.0


class SystemdScopes:
    """Makes a scope for each run, of the user's own manager or, for root, of the system's."""

    title = "systemd scopes"
    limited = ("memory", "pids", "cpu")

    def prepare(self) -> str | None:
        """Make a scope as a trial; return why it cannot be made, or None."""
        if not _SYSTEMD.exists() or shutil.which("systemd-run") is None:
            return "systemd does not run here"
        trial = _command(f"hypha-trial-{os.getpid()}", Limits(64 << 20, 16, 1.0))
        try:
            done = subprocess.run(
                [*trial, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"systemd-run failed: {error}"
        if done.returncode != 0:
            return f"systemd-run failed: {done.stderr.decode(errors='replace').strip()[:200]}"
        return None

    def create(self, name: str, limits: Limits) -> ScopedGroup:
        """Describe the scope of a run, which its process makes itself."""
        return ScopedGroup(name, limits)

    def stop_all(self, pattern: str) -> None:
        """Kill everything in the scopes that match a pattern.

        A failure is logged only.
        """
        if not _SYSTEMD.exists() or shutil.which("systemctl") is None:
            return
        command = ["systemctl", *_manager(), "kill", "--signal=KILL", f"{pattern}.scope"]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_STOP_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.warning("scopes of systemd that a killed worker has left may remain: %s", error)


@dataclass(slots=True)
class ScopedGroup:
    """The scope of one run; implements `layers.Confined`."""

    name: str
    limits: Limits
    _found: Group | None = None

    def apply(self, launch: Launch) -> None:
        """See `layers.Confined`. The command does not inherit the path of the bus."""
        launch.command[:0] = [*_command(self.name, self.limits), "env", "-u", _RUNTIME_FOLDER]
        launch.env.update(_bus())

    def pids(self) -> Sequence[int]:
        """See `layers.Confined`."""
        group = self._group()
        return () if group is None else group.pids()

    def kill(self) -> bool:
        """See `layers.Confined`."""
        group = self._group()
        return group is not None and group.kill()

    def remove(self, timeout: float) -> list[Path]:
        """End what still runs; systemd removes the scope."""
        group = self._group()
        return [] if group is None else group.remove(timeout)

    def describe_end(self, exit_code: int) -> str | None:
        """See `layers.Confined`; unknown once systemd has removed the scope, which it does when it is empty."""
        group = self._group()
        return None if group is None else group.describe_end(exit_code)

    def _group(self) -> Group | None:
        """Return the scope's group; found by its name once the process has made it."""
        if self._found is None:
            folder = next(_find_groups(f"{self.name}.scope"), None)
            self._found = None if folder is None else Group({"": folder}, self.limits)
        return self._found


def _find_groups(name: str) -> Iterator[Path]:
    for mount in find_mounts():
        if not mount.controllers:
            yield from mount.folder.glob(f"**/{name}")


def _command(name: str, limits: Limits) -> list[str]:
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
