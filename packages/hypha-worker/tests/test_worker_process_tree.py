"""Processes: their start by the fork server, their runner, and the end of a tree, with those that survive SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import Process
from support.process_ready import is_alive
from support.waiting import until

from hypha_proto.resources import Resources
from hypha_worker.errors import ExecutionError, ExecutorExitError
from hypha_worker.executors.isolation.layers import Confinement, Finding, Launch
from hypha_worker.executors.isolation.stack import ConfinedRun, IsolationStack
from hypha_worker.executors.process.fork_server_client import ForkServer
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner
from hypha_worker.executors.process.process_tree import TOKEN_VARIABLE, is_in_run, terminate_tree
from hypha_worker.executors.process.spawn import SpawnedProcess, spawn
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.logs.run_log import LogFolder

LEAVES_ANOTHER = """
import subprocess, sys
sleeper = [sys.executable, "-I", "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
left = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.PIPE)
left.stdout.readline()
print(left.pid, flush=True)
"""

NO_LAYERS = ConfinedRun()
TOKEN = f"t{os.getpid()}"  # tests of other processes run at the same time, and end what has their token
TOKENS = {"own": TOKEN, "longer": f"{TOKEN}0", "other": "other", "none": ""}


class KnowsAll(ConfinedRun):
    """A layer that knows its processes, as a control group does."""

    def pids(self) -> list[int]:
        return psutil.pids()


@asynccontextmanager
async def started(code: str, *wrapper: str, **variables: str) -> AsyncIterator[tuple[Process, int]]:
    """Run code with a job's token in a session of its own; yields it and the pid that it prints, which is killed."""
    environment = os.environ | {TOKEN_VARIABLE: TOKEN} | variables
    with anyio.fail_after(30):
        command = [*wrapper, sys.executable, "-c", code]
        process = await anyio.open_process(command, env=environment, start_new_session=True)
        assert process.stdout is not None
        left = int(await process.stdout.receive())
        try:
            yield process, left
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
            await process.aclose()


@pytest.mark.parametrize("own_session", [False, True])
async def test_of_a_run_are_descendants_and_its_session_and_what_a_layer_knows(own_session: bool) -> None:
    """Also an orphan, if it stays in the session or a layer knows it."""
    starts_another = LEAVES_ANOTHER.replace("start_new_session=True", f"start_new_session={own_session}")
    async with started(f"{starts_another}sys.stdin.read()") as (process, left):
        for pid in (process.pid, left):
            assert is_in_run(pid, process.pid, NO_LAYERS)
        assert not is_in_run(os.getpid(), process.pid, NO_LAYERS)
        assert not is_in_run(process.pid, left, NO_LAYERS)
        assert process.stdin is not None
        await process.stdin.aclose()
        await process.wait()
        assert is_in_run(left, process.pid, NO_LAYERS) is not own_session
        assert is_in_run(left, process.pid, KnowsAll())


@pytest.mark.parametrize(("token", "size"), [("own", 0), ("own", 100_000), ("other", 0), ("longer", 0), ("none", 0)])
async def test_a_process_in_a_session_of_its_own_is_found_by_its_token(token: str, size: int) -> None:
    """The token may stand behind much else; another job's token, even one that begins like it, does not count."""
    variables = {"A": "x" * size, "B": f"{TOKEN_VARIABLE}={TOKEN}", TOKEN_VARIABLE: TOKENS[token]}
    async with started(LEAVES_ANOTHER, **variables) as (process, left):
        await process.wait()
        await terminate_tree(process, TOKEN, NO_LAYERS, 30.0)
        assert is_alive(left) is (token != "own")


async def test_a_process_that_loses_its_token_after_sigterm_is_ended() -> None:
    """As one that exits does: the kernel releases its environment a while before it is gone."""
    loses_token = """
import os, signal, sys, time
def exec_without_environment(*_):
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"], {})
signal.signal(signal.SIGTERM, exec_without_environment)
print(1, flush=True)
time.sleep(60)
"""
    leaves_it = LEAVES_ANOTHER.replace('"import time; print(1, flush=True); time.sleep(60)"', repr(loses_token))
    async with started(leaves_it) as (process, left):
        await process.wait()
        assert await terminate_tree(process, TOKEN, NO_LAYERS, 0.5) is None
        assert not is_alive(left)


async def test_a_process_that_has_left_group_and_token_is_ended_by_what_a_layer_knows() -> None:
    """``env -i setsid`` was not found before: it outlived its job."""

    class Layer(ConfinedRun):
        def pids(self) -> list[int]:
            return [left] if psutil.pid_exists(left) else []

        def kill(self) -> bool:
            pytest.fail("SIGTERM was enough")

    async with started(LEAVES_ANOTHER, "env", "-i") as (process, left):
        await process.wait()
        assert await terminate_tree(process, TOKEN, Layer(), 30.0) is None
        assert not is_alive(left)


async def test_what_ignores_sigterm_is_killed_through_the_layer() -> None:
    ignores = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(60)
"""

    class Layer(ConfinedRun):
        def kill(self) -> bool:
            os.kill(process.pid, signal.SIGKILL)
            return True

    async with started(ignores) as (process, _):
        assert await terminate_tree(process, TOKEN, Layer(), 0.1) is None
        assert process.returncode == -signal.SIGKILL


FORGES_ENVIRONMENT = """
import ctypes, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
size = int(sys.argv[1])
private_anonymous_without_reserve = 0x4022
start = libc.mmap(None, ctypes.c_size_t(size), 1, private_anonymous_without_reserve, -1, ctypes.c_long(0))
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
code, end_code, stack, data, end_data, heap, arguments, end_arguments = (
    int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47, 48, 49)
)
layout = (code, end_code, data, end_data, heap, libc.sbrk(0), stack, arguments, end_arguments, start, start + size)
PR_SET_MM, PR_SET_MM_MAP = 35, 14
described = struct.pack("=12QII", *layout, 0, 0, 0xFFFFFFFF)
failed = libc.prctl(PR_SET_MM, PR_SET_MM_MAP, described, ctypes.c_long(len(described)), 0)
print(ctypes.get_errno() if failed else 0, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="procfs is Linux's")
async def test_a_forged_environment_takes_no_memory_of_the_worker() -> None:
    """Any process may declare a gigabyte that it has reserved to be its environment; each end of a job reads all."""
    with anyio.fail_after(30):
        forger = await anyio.open_process([sys.executable, "-c", FORGES_ENVIRONMENT, str(1 << 30)])
        assert forger.stdout is not None
        try:
            answer = await forger.stdout.receive()
            if answer.strip() != b"0":
                pytest.skip(f"this kernel has no PR_SET_MM_MAP: {answer!r}")
            process = await anyio.open_process([sys.executable, "-c", ""], start_new_session=True)
            await process.wait()
            tracemalloc.start()
            await terminate_tree(process, "forged", NO_LAYERS, 30.0)
            peak = tracemalloc.get_traced_memory()[1]
            await process.aclose()
        finally:
            tracemalloc.stop()
            forger.kill()
            await forger.aclose()
    assert peak < 32 << 20


class LimitingLayer:
    """A layer that knows why a run ended only until the run is cleaned up, as the kernel's counters of a cgroup."""

    name = "limiting"

    def __init__(self) -> None:
        self._exists = False

    def probe(self) -> Finding:
        return Finding(True, "limits")

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[LimitingLayer]:
        self._exists = True
        yield self
        self._exists = False

    def apply(self, launch: Launch) -> None:
        pass

    def pids(self) -> Sequence[int] | None:
        return None

    def kill(self) -> bool:
        return False

    def describe_end(self, exit_code: int) -> str | None:
        return "was ended because it used more memory than its lease has" if self._exists else None

    def sweep(self) -> None:
        pass


def executor(**keys: object) -> ExecutorSection:
    return ExecutorSection.model_validate({"class": "train", "name": "x", "cmd": sys.executable, **keys})


def run(settings: ExecutorSection, folder: Path, *layers: LimitingLayer) -> None:
    """Run an executor in a folder."""
    host = HostSettings(
        folder, has_devices=False, logs=LogFolder(folder, max_size=1 << 20, keep=1), stack=IsolationStack(layers)
    )

    async def main() -> None:
        allocation, scope = Allocation(Resources(cpu=1.0)), anyio.CancelScope()
        place = ProcessPlace(folder, allocation, storage=1 << 20, scope=scope, log_name="run")
        values = {"{SOCKET_PATH}": str(folder / "bridge.sock"), "{WORK_DIR}": str(folder)}
        with anyio.fail_after(20):
            await ProcessRunner(settings, host, place).run(values)

    anyio.run(main, backend="trio")


@pytest.mark.parametrize(
    ("end", "is_failed_start"),
    [
        ("sys.exit(1)", True),
        ("sys.exit(127)", True),
        ("sys.exit(2)", False),
        ("sys.exit(75)", False),
        ("sys.exit(137)", False),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_ends_that_may_be_a_failed_start(tmp_path: Path, end: str, is_failed_start: bool) -> None:
    settings = executor(args=("-I", "-S", "-c", f"import os, sys; {end}"))
    with pytest.raises(ExecutionError) as found:
        run(settings, tmp_path)
    assert isinstance(found.value, ExecutorExitError) == is_failed_start


def test_an_exit_that_a_layer_explains_is_no_failed_start(tmp_path: Path) -> None:
    settings = executor(args=("-I", "-S", "-c", "import sys; sys.exit(1)"))
    with pytest.raises(ExecutorExitError):
        run(settings, tmp_path)
    with pytest.raises(ExecutionError, match="was ended because it used more memory than its lease has") as found:
        run(settings, tmp_path, LimitingLayer())
    assert not isinstance(found.value, ExecutorExitError)


KILL_ITSELF = "import os, sys; open(sys.argv[1], 'a').write(sys.argv[2]); os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("counted", "reason"),
    [("oom_kill 8\n", "was ended by SIGKILL, while this machine ended .* no memory left"), ("", "by SIGKILL$")],
)
def test_memory_is_named_if_the_kernel_has_ended_processes_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: str, reason: str
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\n" if counted else "oom_kill 7\n")
    monkeypatch.setattr("hypha_worker.executors.process.process_runner._VMSTAT", counters)
    args = ("-I", "-S", "-c", KILL_ITSELF, str(counters), counted)
    with pytest.raises(ExecutionError, match=reason):
        run(executor(args=args), tmp_path)


def test_a_writable_folder_that_cannot_be_created_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = executor(writable=(file / "cache",))
    with pytest.raises(ExecutionError, match=r"executors\.writable: .*/file/cache cannot be created: Not a directory;"):
        run(settings, tmp_path)


class FullLayer(LimitingLayer):
    """Cannot be prepared."""

    @asynccontextmanager
    async def confine(self, confinement: Confinement) -> AsyncIterator[LimitingLayer]:
        """Fail as a full file system does."""
        raise OSError(errno.ENOSPC, "No space left on device")
        yield


def test_a_layer_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"the layer .* cannot be prepared: .*No space left on device"):
        run(executor(), tmp_path, FullLayer())


@pytest.fixture
def server() -> Iterator[ForkServer]:
    if sys.platform != "linux":
        pytest.skip("the fork server exists on Linux only")
    made = ForkServer()
    yield made
    made.close()


def shell(script: str, **changes: Any) -> Launch:
    return Launch(["/bin/sh", "-c", script], **({"env": {"NAME": "value"}} | changes))


async def read_all(process: SpawnedProcess) -> bytes:
    return b"".join([block async for block in process.stdout])


async def test_a_process_has_its_environment_folder_output_and_session(server: ForkServer, tmp_path: Path) -> None:
    process = await spawn(shell('echo "$NAME $(pwd)"; echo error >&2; cat; umask; exit 3'), tmp_path, server)
    output = await read_all(process)
    assert output.decode().split("\n") == [f"value {tmp_path}", "error", "0077", ""]
    assert await process.wait() == 3
    assert process.returncode == 3
    process.close()


async def test_it_leads_its_own_session_and_inherits_named_descriptors_only(server: ForkServer, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    script = f"readlink /proc/self/fd/*; echo found > /dev/fd/{writer}; sleep 60"
    process = await spawn(shell(script, descriptors=[writer]), tmp_path, server)
    os.close(writer)
    await anyio.wait_readable(reader)
    assert os.read(reader, 10) == b"found\n"
    assert os.getsid(process.pid) == process.pid
    listed = (await process.stdout.receive()).decode().split()
    assert sorted(where.partition(":")[0] for where in listed) == ["/dev/null", "pipe", "pipe", "pipe"], listed
    os.killpg(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_the_id_stays_taken_until_the_end_is_seen(server: ForkServer, tmp_path: Path) -> None:
    process = await spawn(shell("exit 0"), tmp_path, server)
    await read_all(process)
    await until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 60)
    assert await process.wait() == 0
    await until(lambda: not psutil.pid_exists(process.pid), 60)


async def test_many_processes_at_once_end_each_with_its_own_status(server: ForkServer, tmp_path: Path) -> None:
    processes = [await spawn(shell(f"exit {number}"), tmp_path, server) for number in range(100)]
    assert [await process.wait() for process in processes] == list(range(100))


async def test_a_large_environment_and_a_command_that_is_missing(server: ForkServer, tmp_path: Path) -> None:
    large = await spawn(shell("echo ${#LARGE}", env={"LARGE": "x" * 100_000}), tmp_path, server)
    assert await read_all(large) == b"100000\n"
    missing = await spawn(Launch(["/no/such/program"], {}), tmp_path, server)
    assert b"the executor cannot be started" in await read_all(missing)
    assert await missing.wait() == 126
    nowhere = await spawn(shell("echo here"), tmp_path / "none", server)
    assert b"No such file" in await read_all(nowhere)
    assert await nowhere.wait() == 126


async def test_after_the_server_was_killed_its_processes_count_as_killed_and_a_new_one_starts_more(
    server: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = psutil.Process().children()
    first = await spawn(shell("exec sleep 60"), tmp_path, server)
    new = [child for child in psutil.Process().children() if child not in others]
    [started] = [child for child in new if child.pid == os.getpgid(child.pid)]
    started.kill()
    assert await first.wait() == -signal.SIGKILL
    assert "is not known" in caplog.text
    os.killpg(first.pid, signal.SIGKILL)
    second = await spawn(shell("echo again"), tmp_path, server)
    assert await read_all(second) == b"again\n"
    assert await second.wait() == 0


async def test_without_a_server_that_works_a_process_is_started_directly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ForkServer()
    broken.start = lambda *_: (_ for _ in ()).throw(OSError("no memory"))  # type: ignore[method-assign]
    process = await spawn(shell("echo direct"), tmp_path, broken)
    assert await read_all(process) == b"direct\n"
    assert await process.wait() == 0
    assert "start more slowly" in caplog.text
