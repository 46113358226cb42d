"""Tests of starting processes through the fork server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest

from hypha_worker.executors.isolation.layers import Launch
from hypha_worker.executors.process.fork_server_client import ForkServer
from hypha_worker.executors.process.spawn import SpawnedProcess, spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server exists on Linux only")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def shell(script: str, **changes: object) -> Launch:
    launch = Launch(["/bin/sh", "-c", script], {"NAME": "value"})
    for name, value in changes.items():
        setattr(launch, name, value)
    return launch


async def read_all(process: SpawnedProcess) -> bytes:
    found = b""
    try:
        while True:
            found += await process.stdout.receive()
    except anyio.EndOfStream:
        return found


async def test_a_process_has_its_environment_folder_output_and_session(server: ForkServer, tmp_path: Path) -> None:
    process = spawn(shell('echo "$NAME $(pwd)"; echo error >&2; cat; umask; exit 3'), tmp_path, server)
    output = await read_all(process)
    assert output.decode().split("\n") == [f"value {tmp_path}", "error", "0077", ""]
    assert await process.wait() == 3
    assert process.returncode == 3
    process.close()


async def test_it_leads_its_own_session_and_inherits_named_descriptors_only(server: ForkServer, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    script = f"readlink /proc/self/fd/*; echo found > /dev/fd/{writer}; sleep 60"
    process = spawn(shell(script, descriptors=[writer]), tmp_path, server)
    os.close(writer)
    await anyio.wait_readable(reader)
    assert os.read(reader, 10) == b"found\n"
    assert os.getsid(process.pid) == process.pid
    listed = (await process.stdout.receive()).decode().split()
    assert sorted(where.partition(":")[0] for where in listed) == ["/dev/null", "pipe", "pipe", "pipe"], listed
    os.killpg(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_the_id_stays_taken_until_the_end_is_seen(server: ForkServer, tmp_path: Path) -> None:
    process = spawn(shell("exit 0"), tmp_path, server)
    await read_all(process)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        await anyio.sleep(0.01)
    assert await process.wait() == 0
    while psutil.pid_exists(process.pid):
        await anyio.sleep(0.01)


async def test_many_processes_at_once_end_each_with_its_own_status(server: ForkServer, tmp_path: Path) -> None:
    processes = [spawn(shell(f"exit {number}"), tmp_path, server) for number in range(100)]
    assert [await process.wait() for process in processes] == list(range(100))


async def test_a_large_environment_and_a_command_that_is_missing(server: ForkServer, tmp_path: Path) -> None:
    large = spawn(shell("echo ${#LARGE}", env={"LARGE": "x" * 100_000}), tmp_path, server)
    assert await read_all(large) == b"100000\n"
    missing = spawn(Launch(["/no/such/program"], {}), tmp_path, server)
    assert b"the executor cannot be started" in await read_all(missing)
    assert await missing.wait() == 126
    nowhere = spawn(shell("echo here"), tmp_path / "none", server)
    assert b"No such file" in await read_all(nowhere)
    assert await nowhere.wait() == 126


async def test_after_the_server_was_killed_its_processes_count_as_killed_and_a_new_one_starts_more(
    server: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = spawn(shell("exec sleep 60"), tmp_path, server)
    [started] = [child for child in psutil.Process().children() if child.pid == os.getpgid(child.pid)]
    started.kill()
    assert await first.wait() == -signal.SIGKILL
    assert "is not known" in caplog.text
    os.killpg(first.pid, signal.SIGKILL)
    second = spawn(shell("echo again"), tmp_path, server)
    assert await read_all(second) == b"again\n"
    assert await second.wait() == 0


async def test_without_a_server_that_works_a_process_is_started_directly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ForkServer()
    broken.start = lambda *_: (_ for _ in ()).throw(OSError("no memory"))  # type: ignore[method-assign]
    process = spawn(shell("echo direct"), tmp_path, broken)
    assert await read_all(process) == b"direct\n"
    assert await process.wait() == 0
    assert "start more slowly" in caplog.text
