"""The layer `bubblewrap`: namespaces of processes, files, IPC and network, made by the program bwrap.

As root, the process runs in the namespaces as the user that the layer `own-uid` has chosen (`own_uid`); as another
user, in a user namespace that maps only that user. In both cases it has no capabilities and cannot make user
namespaces: the filter of `seccomp` refuses that. Paths inside equal paths outside.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from hypha_proto.resources import GIGABYTE, Resources
from hypha_worker.executors.isolation.layers import Confined, Confinement, Finding, Launch, Layer
from hypha_worker.executors.isolation.limits import process_limit
from hypha_worker.executors.isolation.seccomp import seccomp_filter
from hypha_worker.executors.isolation.visible_paths import ETC, SYSTEM_FOLDERS, current_period
from hypha_worker.hardware.devices import device_nodes
from hypha_worker.leasing.capacity import Allocation

_PROBE_TIMEOUT: Final = 10.0
_TEMPORARY_SIZE: Final = 1 * GIGABYTE
"""Bytes of /tmp and of /dev/shm, each, for a lease without memory; with it, half of it."""
_CPUS: Final = Path("/sys/devices/system/cpu")
_LAST_STEPS: Final = 'umask 077; cd -- "$1" && shift && exec /usr/bin/env --default-signal=TERM -- "$@"'
"""Shell command that the user runs inside; only the user may enter the run's folder."""
_CAPABILITIES_FOR_UID: Final = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")


class BubblewrapLayer(Layer):
    """See the module."""

    name = "bubblewrap"

    def __init__(self, private: Sequence[Path] = ()) -> None:
        """Prepare.

        Args:
            private: files and folders that stay hidden although they lie in a folder that is shown.
        """
        self._private = private

    def probe(self) -> Finding:
        """See `Layer.probe`."""
        if sys.platform != "linux":
            return Finding(False, "it exists on Linux only")
        program = shutil.which("bwrap")
        if program is None:
            return Finding(False, "bwrap is not installed: install the package bubblewrap")
        with tempfile.TemporaryDirectory(prefix="hypha-probe-") as folder:
            error = _try(program, Path(folder))
        if error is not None:
            return Finding(False, f"bwrap cannot make a sandbox here: {error}")
        return Finding(True, "jobs see their own folder, processes and devices only, and have no capabilities")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[BubblewrapConfined]:
        """See `Layer.confine`."""
        filter_file = _open_filter()
        try:
            yield BubblewrapConfined(confinement, self._private, filter_file)
        finally:
            os.close(filter_file)


class BubblewrapConfined(Confined):
    """One sandbox."""

    def __init__(self, confinement: Confinement, private: Sequence[Path], filter_file: int) -> None:
        self._confinement = confinement
        self._private = private
        self._filter_file = filter_file

    def apply(self, launch: Launch) -> None:
        """Put bwrap in front of the command."""
        uid: int | None = launch.steps.pop("uid", None)
        inside: list[str] = []
        if uid is not None or os.geteuid() != 0:  # else all processes of root would count
            processes = process_limit(self._confinement.allocation.resources.cpu)
            inside += ["/usr/bin/prlimit", f"--nproc={processes}:{processes}", "--"]
        if uid is not None:
            inside += ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all",
                       "--bounding-set=-all", "--"]  # fmt: skip
        inside += ["/bin/sh", "-c", _LAST_STEPS, "sh", str(self._confinement.work_dir)]
        launch.command = [
            shutil.which("bwrap") or "bwrap",
            *_namespaces(uid, network=self._confinement.network),
            *("--seccomp", str(self._filter_file)),
            *_file_system(self._confinement, self._private),
            *_read_only(is_root=uid is None and os.geteuid() == 0),
            *("--chdir", "/", "--"),
            *inside,
            *launch.command,
        ]
        launch.descriptors.append(self._filter_file)
        launch.steps["ignored_signals"] = ["SIGTERM"]  # by bwrap, whose end would be that of all processes at once
        launch.reports_signals_as_status = True


def _namespaces(uid: int | None, *, network: bool) -> list[str]:
    options = ["--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        options.append("--unshare-user")
    if not network:
        options.append("--unshare-net")
    if uid is not None:
        options += [word for name in _CAPABILITIES_FOR_UID for word in ("--cap-add", name)]
    return options


def _file_system(confinement: Confinement, private: Sequence[Path]) -> list[str]:
    """Return the options that build the new root; later ones cover earlier ones."""
    size = str(int(confinement.allocation.resources.memory * GIGABYTE / 2) or _TEMPORARY_SIZE)
    shown = [(path, "--ro-bind-try") for path in confinement.readable] + [
        (path, "--bind") for path in confinement.writable
    ]
    options = [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp"),
        *_parents(
            [*map(Path, ETC), _CPUS, *(path for path, _ in shown), confinement.work_dir, confinement.socket_path]
        ),
        *_system_folders(current_period()),
        *_gpu_options(confinement.allocation),
    ]
    for path, option in sorted(shown):
        options += [option, str(path), str(path)]
    options += _covers(tuple(private), tuple(path for path, _ in shown), current_period())
    for path in (confinement.work_dir, confinement.socket_path):
        options += ["--bind", str(path), str(path)]
    return options


def _read_only(*, is_root: bool) -> list[str]:
    """Return the options that close the new root; of root without a uid of its own also /proc, for its sysctls."""
    return [word for path in ("/dev", *(["/proc"] if is_root else []), "/") for word in ("--remount-ro", path)]


def _parents(paths: Iterable[Path]) -> list[str]:
    """Return options that make the folders above `paths` enterable by every user; bwrap makes them for root only."""
    present = ("/dev", "/proc", *SYSTEM_FOLDERS)
    made = {parent for path in paths for parent in path.parents} - {Path("/"), Path("/tmp")}
    missing = [parent for parent in sorted(made) if not any(parent.is_relative_to(folder) for folder in present)]
    return [word for parent in missing for word in ("--perms", "0755", "--dir", str(parent))]


@functools.lru_cache(maxsize=1)
def _system_folders(_period: int) -> list[str]:
    options: list[str] = []
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        else:
            options += ["--ro-bind-try", folder, folder]
    for entry in (*ETC, str(_CPUS), str(_CPUS.with_name("node"))):
        if os.path.exists(entry):
            options += ["--ro-bind", entry, entry]
    return options


@functools.lru_cache(maxsize=64)
def _covers(private: Sequence[Path], shown: Sequence[Path], _period: int) -> list[str]:
    """Return options that cover private files and folders in what is shown, also where a link leads to them."""
    found: dict[Path, Path] = {}
    for path in filter(Path.exists, private):
        real = path.resolve()
        for place in (*shown, *map(Path, (*SYSTEM_FOLDERS, *ETC))):
            if real.is_relative_to(origin := place.resolve()):
                found[place / real.relative_to(origin)] = real
    return [word for place, real in found.items() for word in _cover(place, is_folder=real.is_dir())]


def _cover(place: Path, *, is_folder: bool) -> tuple[str, ...]:
    return ("--tmpfs", str(place)) if is_folder else ("--ro-bind", "/dev/null", str(place))


def _gpu_options(allocation: Allocation) -> list[str]:
    """Return options for the device nodes of a lease's GPUs; of all GPUs where the worker lists no devices."""
    nodes = device_nodes(allocation.visible_devices)
    if not nodes:
        return []
    return ["--ro-bind", "/sys", "/sys", *(word for node in nodes for word in ("--dev-bind", str(node), str(node)))]


def _open_filter() -> int:
    """Return a memory file with the seccomp filter, to be inherited by bwrap."""
    descriptor = os.memfd_create("hypha-seccomp", 0)
    with FileIO(descriptor, "r+", closefd=False) as file:
        file.write(seccomp_filter(platform.machine()))
        file.seek(0)
    return descriptor


def _try(program: str, folder: Path) -> str | None:
    """Start a sandbox; return why it does not work, or None."""
    socket_path = folder / "socket"
    socket_path.touch()
    confinement = Confinement("probe", folder, socket_path, Allocation(Resources()), 0, network=False)
    script = "if command -v unshare >/dev/null && unshare --user true 2>/dev/null; then echo nested; fi"
    filter_file = _open_filter()
    try:
        launch = Launch(["/bin/sh", "-c", script], {})
        BubblewrapConfined(confinement, (), filter_file).apply(launch)
        done = subprocess.run(
            [program, *launch.command[1:]],
            pass_fds=[filter_file],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(filter_file)
    if "nested" in done.stdout:
        return "user namespaces can still be made inside it"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode != 0 else None
