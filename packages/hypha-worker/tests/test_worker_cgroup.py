"""The layer `cgroup`: limits of a lease that the kernel holds, and the end of everything in a run's group."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path, PurePosixPath

import anyio
import pytest
from support.process_ready import is_alive
from support.waiting import until

from hypha_proto.resources import Resources
from hypha_worker.executors.isolation.cgroup import CgroupLayer, CgroupV2, ScopedGroup
from hypha_worker.executors.isolation.layers import Confined, Confinement, Launch
from hypha_worker.executors.isolation.limits import RunLimits
from hypha_worker.hardware.control_groups import Mount, cpu_quota, find_mounts, find_own_groups, memory_quota
from hypha_worker.leasing.capacity import Allocation

JOIN = 'for file; do [ "$file" = -- ] && break; echo 0 > "$file" || exit 99; shift; done; shift; exec "$@"'
PYTHON = [sys.executable, "-I", "-S", "-c"]
LEAVES_ANOTHER = """
import os, subprocess, sys
quiet = subprocess.Popen(["env", "-i", "setsid", "sleep", "60"], stdout=subprocess.DEVNULL)
print(quiet.pid, flush=True)
"""
FORK_BOMB = """
import os, time
print("begun", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


def confinement(folder: Path, name: str = "run", **amounts: float) -> Confinement:
    allocation = Allocation(Resources(**amounts))
    return Confinement(name, folder / "hypha-job", folder / "socket", allocation, storage=1 << 20)


def launch(confined: Confined, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command as the launcher does: it joins the groups, and becomes the command."""
    start = Launch(command, dict(os.environ))
    confined.apply(start)
    joined = ["/bin/sh", "-c", JOIN, "sh", *start.steps.get("cgroups", []), "--", *start.command]
    return subprocess.Popen(joined, env=start.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def groups(confined: Confined) -> list[Path]:
    """Return the folders of the groups that a command joins."""
    start = Launch([], {})
    confined.apply(start)
    return [Path(file).parent for file in start.steps["cgroups"]]


def in_other(folder: Path) -> AbstractAsyncContextManager[Confined]:
    """Confine a run of a worker with another work directory."""
    other = CgroupLayer(folder / "other")
    assert other.probe().works
    return other.confine(confinement(folder / "other"))


async def until_joined(confined: Confined) -> None:
    """Wait until a process is in all groups: it joins one after the other, and cannot if one is removed before."""
    folders = groups(confined)
    await until(lambda: all((folder / "cgroup.procs").read_text() for folder in folders), 60)


async def test_a_lease_without_an_amount_of_memory_has_no_limit_of_it(cgroups: CgroupLayer, tmp_path: Path) -> None:
    async with cgroups.confine(confinement(tmp_path, cpu=1)) as confined:
        process = launch(confined, [*PYTHON, "bytearray(200_000_000)"])
        assert await anyio.to_thread.run_sync(process.wait) == 0


async def test_a_fork_bomb_is_bounded_and_ends(cgroups: CgroupLayer, tmp_path: Path) -> None:
    bound = RunLimits.of(Allocation(Resources(cpu=0.5))).processes
    async with cgroups.confine(confinement(tmp_path, cpu=0.5)) as confined:
        bomb = launch(confined, [*PYTHON, FORK_BOMB])
        expected = f"could not start more than {bound} processes and threads, the limit of its lease"
        await until(lambda: confined.describe_end(-signal.SIGKILL) == expected, 60)  # a start was refused
        await until(lambda: len(confined.pids() or ()) == bound, 60)  # the last one that was not may still be joining
        assert confined.kill()
        await until(lambda: not confined.pids(), 60)
        assert bomb.wait() == -signal.SIGKILL
        assert confined.describe_end(-signal.SIGKILL) == expected


async def test_processor_time_is_the_lease_s_share(cgroups: CgroupLayer, tmp_path: Path) -> None:
    async with cgroups.confine(confinement(tmp_path, cpu=0.2)) as confined:
        files = [path for folder in groups(confined) for path in folder.glob("cpu.*")]
        shares = [path.read_text() for path in files if path.name in ("cpu.max", "cpu.cfs_quota_us")]
        assert [share.split()[0] for share in shares] == ["20000"]
        process = launch(confined, [*PYTHON, "while True: pass"])
        await until(lambda: any(re.search("nr_throttled [1-9]", path.read_text()) for path in files), 60)
        process.kill()
        process.wait()


async def test_a_process_without_token_in_a_session_of_its_own_ends_with_the_group(
    cgroups: CgroupLayer, tmp_path: Path
) -> None:
    left: list[int] = []
    async with cgroups.confine(confinement(tmp_path)) as confined:
        process = launch(confined, [*PYTHON, LEAVES_ANOTHER])
        output, _ = await anyio.to_thread.run_sync(process.communicate)
        left.append(int(output))
        assert left[0] in (confined.pids() or ())
    assert not is_alive(left[0])


async def test_a_sweep_ends_what_the_same_work_directory_s_worker_left(cgroups: CgroupLayer, tmp_path: Path) -> None:
    async with in_other(tmp_path) as confined:
        started = []
        kept = launch(confined, ["sleep", "60"])
        async with cgroups.confine(confinement(tmp_path)) as forgotten:
            started.append(launch(forgotten, ["sleep", "60"]))
            await until_joined(forgotten)
            CgroupLayer(tmp_path).sweep()  # as of a worker that starts after this one was killed
            assert started[0].wait() == -signal.SIGKILL
            assert forgotten.pids() == []
        assert kept.poll() is None
        kept.kill()
        kept.wait()


async def test_a_sweep_removes_old_groups_without_processes_of_other_work_directories(
    cgroups: CgroupLayer, tmp_path: Path
) -> None:
    """Workers of temporary directories that are killed never start again."""
    async with in_other(tmp_path) as confined:
        folders = groups(confined)
        cgroups.sweep()
        assert all(folder.exists() for folder in folders), "it may be about to start"
        for folder in folders:
            os.utime(folder, (0, 0))
        process = launch(confined, ["sleep", "60"])
        await until_joined(confined)  # a sweep removes groups without a process
        cgroups.sweep()
        assert process.poll() is None
        assert all(folder.exists() for folder in folders)
        process.kill()
        process.wait()
        cgroups.sweep()
        assert not any(folder.exists() for folder in folders)


async def test_a_sweep_leaves_old_groups_that_it_may_not_remove(
    cgroups: CgroupLayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another user, or of a hierarchy that is mounted read-only: the worker starts all the same."""

    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    async with in_other(tmp_path) as confined:
        folders = groups(confined)
        for folder in folders:
            os.utime(folder, (0, 0))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rmdir", refuse)
            cgroups.sweep()
        assert all(folder.exists() for folder in folders)


async def test_the_groups_are_gone_after_a_cancellation(cgroups: CgroupLayer, tmp_path: Path) -> None:
    folders: list[Path] = []
    with anyio.CancelScope() as scope:
        async with cgroups.confine(confinement(tmp_path)) as confined:
            folders.extend(groups(confined))
            process = launch(confined, ["sleep", "60"])
            await until_joined(confined)
            scope.cancel()
            await anyio.sleep_forever()
    assert process.wait() == -signal.SIGKILL
    assert folders
    assert not any(folder.exists() for folder in folders)


# ------------------------------------------------------------------------------------------ what this machine has not


def test_a_delegated_group_of_version_2_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "delegated"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    for name in ("cgroup.subtree_control", "cgroup.procs"):
        (own / name).touch()
    monkeypatch.setattr("hypha_worker.executors.isolation.cgroup._SYSTEMD", tmp_path / "none")
    variant = CgroupV2("worker", own)
    assert variant.prepare() is None
    assert (own / "worker" / "cgroup.procs").read_text() == "0"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    make_folder = Path.mkdir

    def make_group(folder: Path) -> None:
        make_folder(folder)
        (folder / "memory.swap.max").touch()  # as a kernel with swap accounting does

    monkeypatch.setattr(Path, "mkdir", make_group)
    group = variant.create("run", RunLimits.of(Allocation(Resources(cpu=1.5, memory=2))))
    values = {path.name: path.read_text() for path in (own / "run").iterdir()}
    assert values == {
        "memory.max": "2000000000",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "1024",
        "cpu.max": "150000 100000",
    }
    (own / "run" / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n")
    assert "more memory than the 2 GB of its lease" in str(group.describe_end(137))
    assert group.describe_end(0) is None


def test_a_group_of_version_2_without_controllers_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.executors.isolation.cgroup._SYSTEMD", tmp_path / "none")
    for name, text in {"cgroup.controllers": "cpu\n", "cgroup.subtree_control": "", "cgroup.procs": ""}.items():
        (tmp_path / name).write_text(text)
    assert "has no controllers for memory and pids" in str(CgroupV2("worker", tmp_path).prepare())


def test_a_scope_of_systemd_is_put_in_front_of_the_command() -> None:
    start = Launch(["/usr/bin/bwrap", "--", "python"], {"PATH": "/usr/bin"})
    scope = ScopedGroup("hypha-1.run", RunLimits.of(Allocation(Resources(cpu=0.5, memory=1))))
    scope.apply(start)
    manager = [] if os.geteuid() == 0 else ["--user"]
    assert start.command == [
        "systemd-run", *manager, "--scope", "--quiet", "--collect", "--unit=hypha-1.run", "--property=TasksMax=768",
        "--property=MemoryMax=1000000000", "--property=MemorySwapMax=0", "--property=CPUQuota=50%", "--",
        "env", "-u", "XDG_RUNTIME_DIR", "/usr/bin/bwrap", "--", "python",
    ]  # fmt: skip
    assert not scope.pids()
    assert not scope.kill()
    assert scope.describe_end(1) is None


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""


def test_the_groups_of_this_process_are_found_through_their_mounts() -> None:
    mounts = find_mounts(MOUNTS)
    root = Path("/sys/fs/cgroup")
    assert mounts[1] == Mount(root / "memory", PurePosixPath("/docker/abc"), frozenset({"rw", "memory"}))
    own = find_own_groups(mounts, "9:pids:/x\n4:memory:/docker/abc/job\n2:cpu,cpuacct:/y\n0::/user.slice/z\n")
    assert own == {
        "memory": root / "memory" / "job",
        "cpu": root / "cpu,cpuacct" / "y",
        "cpuacct": root / "cpu,cpuacct" / "y",
        "": root / "unified" / "user.slice" / "z",
    }
    assert find_own_groups(mounts, "4:memory:/elsewhere\n") == {}, "outside of what is mounted"


def test_a_probe_leaves_no_group(cgroups: CgroupLayer) -> None:
    assert cgroups.probe().works
    assert [found for mount in find_mounts() for found in mount.folder.rglob(f"*.trial-{os.getpid()}")] == []


NEWER = "0::/machine/job\n"
OLDER = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n"


def mounts(folder: Path, text: str) -> list[Mount]:
    if text == NEWER:
        return [Mount(folder, PurePosixPath("/"), frozenset())]
    root = PurePosixPath("/docker/abc")  # as in a container without a namespace of its own
    return [Mount(folder / name, root, frozenset({name})) for name in ("cpu", "memory")]


@pytest.mark.parametrize(
    ("groups", "files", "cores", "size"),
    [
        (NEWER, {"machine/job/cpu.max": "50000 100000", "machine/job/memory.max": "2000000000"}, 0.5, 2e9),
        (NEWER, {"machine/cpu.max": "150000 100000", "machine/job/cpu.max": "max 100000"}, 1.5, math.inf),
        (NEWER, {"memory.max": "1000", "machine/job/memory.max": "max"}, math.inf, 1000.0),
        (NEWER, {"machine/job/cpu.max": "200000 100000", "cpu.max": "100000 100000"}, 1.0, math.inf),
        (NEWER, {"../cpu.max": "1 100000", "other/memory.max": "1"}, math.inf, math.inf),
        (
            OLDER,
            {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "50000", "memory/memory.limit_in_bytes": "3000"},
            0.5,
            3000.0,
        ),
        (OLDER, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, math.inf),
        (OLDER, {"cpu/cpu.cfs_quota_us": "junk", "memory/memory.limit_in_bytes": ""}, math.inf, math.inf),
        ("", {}, math.inf, math.inf),
    ],
)
def test_quotas_of_groups_and_those_above_them(
    tmp_path: Path, groups: str, files: Mapping[str, str], cores: float, size: float
) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    found = mounts(root, groups)
    assert (cpu_quota(found, groups), memory_quota(found, groups)) == (cores, size)
