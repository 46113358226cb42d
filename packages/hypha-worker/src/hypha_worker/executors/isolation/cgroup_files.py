"""The files of the control group of a run, in one or several hierarchies: those of cgroups(7)."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hypha_proto.resources import GIGABYTE
from hypha_worker.executors.isolation.layers import Confined, Launch
from hypha_worker.executors.isolation.limits import RunLimits
from hypha_worker.hardware.control_groups import read_or_empty

_EVENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "oom_kill": {"memory": "memory.oom_control", "": "memory.events"},
    "max": {"pids": "pids.events", "": "pids.events"},
}
"""Files of the counters of events, by controller."""
_OF_SWAP: Final = frozenset({"memory.swap.max", "memory.memsw.limit_in_bytes"})
"""Settings that kernels without swap accounting lack."""
_FREEZE_TIMEOUT: Final = 0.2
_POLL: Final = 0.005


class Group(Confined):
    """The group of one run, in each of its hierarchies."""

    def __init__(self, folders: Mapping[str, Path], limits: RunLimits) -> None:
        """Describe a group, which need not exist.

        Args:
            folders: by controller; ``""`` is version 2.
            limits: those of its processes.
        """
        self._folders = folders
        self._limits = limits
        self._counts: dict[str, int] = {}
        """Newest value of each counter, which outlives the group."""

    @classmethod
    def create(
        cls, parents: Mapping[str, Path], name: str, limits: RunLimits, settings: Iterable[tuple[str, str, object]]
    ) -> Group:
        """Make a group.

        Args:
            parents: folders in which it is made, by controller.
            name: that of the group.
            limits: those of its processes.
            settings: controller, file and value of each setting, in the order in which they are written.

        Raises:
            OSError: it cannot be made; nothing of it is left.
        """
        group = cls({controller: parent / name for controller, parent in parents.items()}, limits)
        try:
            for folder in group.folders.values():
                folder.mkdir()
            for controller, name_of_file, value in settings:
                file = group.folders[controller] / name_of_file
                if file.name not in _OF_SWAP or file.exists():
                    file.write_text(str(value))
        except OSError:
            group.remove(0)
            raise
        return group

    @property
    def folders(self) -> Mapping[str, Path]:
        """Its folders by controller; ``""`` is version 2."""
        return self._folders

    def apply(self, launch: Launch) -> None:
        """See `Confined.apply`: the launcher joins the group."""
        launch.steps["cgroups"] = [str(file) for file in self.procs]

    @property
    def procs(self) -> Sequence[Path]:
        """Files that a process joins the group by, writing 0 to each."""
        return [folder / "cgroup.procs" for folder in self.folders.values()]

    def pids(self) -> Sequence[int]:
        """Return the ids of all live processes of the group."""
        return sorted({pid for file in self.procs for pid in _read_pids(file)})

    def kill(self) -> bool:
        """Send SIGKILL to all processes, also to those that they are just starting."""
        if (v2 := self.folders.get("")) is not None and (v2 / "cgroup.kill").exists():
            with suppress(FileNotFoundError):  # the group is gone
                (v2 / "cgroup.kill").write_text("1")
            return True
        with _frozen(self.folders.get("freezer")):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return True

    def remove(self, timeout: float) -> list[Path]:
        """End what still runs and remove the group.

        Args:
            timeout: seconds that the processes have to end.

        Returns:
            The folders that are left, because processes in them cannot be ended.
        """
        self._count_events()
        deadline = time.monotonic() + timeout
        while left := [folder for folder in self.folders.values() if not remove_empty(folder)]:
            if time.monotonic() >= deadline:
                return left
            self.kill()
            time.sleep(_POLL)
        return []

    def describe_end(self, exit_code: int) -> str | None:
        """See `Confined.describe_end`: a limit is named if the kernel has counted that it was reached."""
        self._count_events()
        if exit_code == 0:
            return None
        if self._limits.memory is not None and self._counts["oom_kill"] > 0:
            amount = f"{self._limits.memory / GIGABYTE:g} GB"
            return f"was ended because it used more memory than the {amount} of its lease (memory): request more"
        if self._counts["max"] > 0:
            return f"could not start more than {self._limits.processes} processes and threads, the limit of its lease"
        return None

    def _count_events(self) -> None:
        for name, files in _EVENTS.items():
            found = [_count(self.folders[kind] / file, name) for kind, file in files.items() if kind in self.folders]
            self._counts[name] = max(0, self._counts.get(name, 0), *found)


@contextmanager
def _frozen(folder: Path | None) -> Iterator[None]:
    """Stop all processes of a group of the freezer for the time of the context, so that none starts another."""
    if folder is None:
        yield
        return
    state = folder / "freezer.state"
    with suppress(FileNotFoundError):  # the group is gone
        state.write_text("FROZEN")
    deadline = time.monotonic() + _FREEZE_TIMEOUT
    while read_or_empty(state) == "FREEZING\n" and time.monotonic() < deadline:
        time.sleep(_POLL)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            state.write_text("THAWED")


def _read_pids(file: Path) -> Iterator[int]:
    try:
        text = file.read_text()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # the group is gone
            raise
        return
    yield from (int(line) for line in text.split() if line != "0")  # 0: of another pid namespace


def remove_empty(folder: Path) -> bool:
    """Remove a group; return False if it still has processes."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def _count(file: Path, name: str) -> int:
    """Return a counter of a file with lines such as ``oom_kill 1``; 0 if it has none."""
    fields = (line.split() for line in read_or_empty(file).splitlines())
    return next((int(found[1]) for found in fields if found[0] == name), 0)
