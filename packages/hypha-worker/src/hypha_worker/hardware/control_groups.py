"""Control groups of this process: where they are, and their quotas, as those of a container.

The files are those of cgroups(7), versions 1 and 2. For quotas the limits of all groups above count, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a hierarchy is mounted."""

    folder: Path
    root: PurePosixPath
    """Group of the hierarchy that is visible there."""
    controllers: frozenset[str]
    """Those of version 1; empty for version 2."""


def find_mounts(text: str | None = None) -> Sequence[Mount]:
    """Return where hierarchies of both versions are mounted, from the lines of ``/proc/self/mountinfo``."""
    lines = (read_or_empty(_MOUNTS) if text is None else text).splitlines()
    return [mount for line in lines if (mount := _parse_mount(line)) is not None]


def _parse_mount(line: str) -> Mount | None:
    before, _, after = line.partition(" - ")
    kind, _, options = after.partition(" ")
    if kind not in ("cgroup", "cgroup2"):
        return None
    _, _, _, root, folder, *_ = before.split(" ")
    controllers = frozenset(options.rsplit(" ", 1)[-1].split(",")) if kind == "cgroup" else frozenset[str]()
    return Mount(Path(folder), PurePosixPath(root), controllers)


def find_own_groups(mounts: Sequence[Mount], text: str | None = None) -> Mapping[str, Path]:
    """Return the folder of this process's group by controller; that of version 2 has the key ``""``.

    Args:
        mounts: where hierarchies are mounted.
        text: lines of ``/proc/self/cgroup``, if not the present ones.
    """
    found: dict[str, Path] = {}
    for line in (read_or_empty(_OWN) if text is None else text).splitlines():
        _, controllers, group = line.split(":", 2)
        for name in controllers.split(","):
            mount = next((each for each in mounts if name in (each.controllers or {""})), None)
            if mount is not None and (folder := _folder_of(mount, PurePosixPath(group))) is not None:
                found[name] = folder
    return found


def _folder_of(mount: Mount, group: PurePosixPath) -> Path | None:
    return mount.folder / group.relative_to(mount.root) if group.is_relative_to(mount.root) else None


def read_or_empty(path: Path) -> str:
    """Return the text of a file, or an empty one if it cannot be read."""
    try:
        return path.read_text()
    except OSError:  # there is no procfs, as on macOS
        return ""


def cpu_quota(mounts: Sequence[Mount] | None = None, groups: str | None = None) -> float:
    """Return the cores that the groups allow; infinite without a limit. The arguments are those of `memory_quota`."""
    return min((_cores(folder) for folder in _folders("cpu", mounts, groups)), default=math.inf)


def memory_quota(mounts: Sequence[Mount] | None = None, groups: str | None = None) -> float:
    """Return the bytes of memory that the groups allow; infinite without a limit.

    Args:
        mounts: where hierarchies are mounted, if not as on this machine.
        groups: lines of ``/proc/self/cgroup``, if not the present ones.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    found = [_number(folder / name) for folder in _folders("memory", mounts, groups) for name in names]
    return min(found, default=math.inf)


def _folders(controller: str, mounts: Sequence[Mount] | None, groups: str | None) -> Iterator[Path]:
    """Yield the folders of this process's group and those above it, of the controller and of version 2."""
    mounts = find_mounts() if mounts is None else mounts
    own = find_own_groups(mounts, groups)
    roots = {mount.folder for mount in mounts}
    for folder in (own[name] for name in (controller, "") if name in own):
        for path in (folder, *folder.parents):
            yield path
            if path in roots:
                break


def _cores(folder: Path) -> float:
    quota = _number(folder / "cpu.max")
    if math.isfinite(quota):
        return quota / _number(folder / "cpu.max", 1)
    quota = _number(folder / "cpu.cfs_quota_us")
    return quota / _number(folder / "cpu.cfs_period_us") if 0 < quota < math.inf else math.inf


def _number(path: Path, position: int = 0) -> float:
    """Return a number of a file; infinite if it is missing or states no limit."""
    try:
        return float(path.read_text().split()[position])
    except (OSError, ValueError, IndexError):  # "max"
        return math.inf
