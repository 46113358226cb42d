"""The control socket of a worker: who can reach it, and what many, slow or confined clients can do to others."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from support.waiting import until

from hypha_proto.resources import Resources
from hypha_worker.control.client import ask_worker
from hypha_worker.control.commands import PauseCommands, load_pause
from hypha_worker.control.server import MAX_ANSWERING, MAX_READING, Answer, ControlServer, socket_path
from hypha_worker.leasing.capacity import Capacity
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.work_dir import control_folder, prepare_control_folder

CONFINED = """
import ctypes, json, socket, sys
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which every layer without bubblewrap sets
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(30)
    client.connect(sys.argv[1])
    client.sendall(b'{"echo": {}}')
    client.shutdown(socket.SHUT_WR)
    print(client.makefile().read())
"""


async def echo(arguments: Mapping[str, Any], answer: Answer) -> None:
    await answer({"echo": dict(arguments)})


async def wait_forever(_arguments: Mapping[str, Any], answer: Answer) -> None:
    await answer({"waits": True})
    await anyio.sleep_forever()


@pytest.fixture
def with_server(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Path]]:
    """Return a function that opens a control server with the commands ``echo`` and ``wait``."""

    @asynccontextmanager
    async def opened(name: str = ".") -> AsyncIterator[Path]:
        (work_dir := tmp_path / name).mkdir(exist_ok=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ControlServer(work_dir, {"echo": echo, "wait": wait_forever}).serve)
            path = socket_path(work_dir)
            await until(lambda: path.exists(), 60)
            yield path
            tasks.cancel_scope.cancel()

    return opened


async def ask(path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    async with await anyio.connect_unix(path) as stream:
        await stream.send(json.dumps(request).encode())
        await stream.send_eof()
        found: dict[str, Any] = json.loads(await stream.receive())
        return found


async def test_only_the_workers_user_reaches_the_socket(with_server: Any, tmp_path: Path) -> None:
    control_folder(tmp_path).mkdir(mode=0o755)
    async with with_server() as path:
        assert [stat.S_IMODE(os.stat(each).st_mode) for each in (path, path.parent)] == [0o600, 0o700]
        assert await ask(path, {"echo": {"a": 1}}) == {"echo": {"a": 1}}


def test_a_control_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    control_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        prepare_control_folder(tmp_path)
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what confines a process")
async def test_a_confined_process_controls_nothing(with_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    if "NoNewPrivs:\t1" in Path("/proc/self/status").read_text():
        pytest.skip("this process is confined itself")
    async with with_server() as path:
        command = [sys.executable, "-I", "-S", "-c", CONFINED, str(path)]
        done = await anyio.to_thread.run_sync(lambda: subprocess.run(command, capture_output=True, check=True))
        assert "a process in a sandbox may not control the worker" in json.loads(done.stdout)["error"]
        assert await ask(path, {"echo": {}}) == {"echo": {}}
    assert "a confined process, such as a job's, tried to control this worker" in caplog.text


async def test_many_idle_clients_keep_no_other_one_waiting(with_server: Any) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    async with with_server() as path:
        before = descriptors()
        with ExitStack() as stack:
            for number in range(4 * MAX_READING):
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
                if number % MAX_READING == 0:
                    assert await ask(path, {"echo": {"n": number}}) == {"echo": {"n": number}}
            assert await ask(path, {"echo": {}}) == {"echo": {}}
            assert descriptors() < before + 6 * MAX_READING


async def test_clients_that_wait_are_bounded(with_server: Any) -> None:
    async with with_server() as path, anyio.create_task_group() as tasks:
        answers: list[dict[str, Any]] = []

        async def wait() -> None:
            async with await anyio.connect_unix(path) as stream:
                await stream.send(b'{"wait": {}}')
                await stream.send_eof()
                answers.append(json.loads(await stream.receive()))
                await anyio.sleep_forever()

        for _ in range(MAX_ANSWERING):
            tasks.start_soon(wait)
        await until(lambda: len(answers) >= MAX_ANSWERING, 60)
        assert "other clients wait for an answer" in (await ask(path, {"echo": {}}))["error"]
        tasks.cancel_scope.cancel()


async def test_commands_at_the_same_time_leave_disk_and_memory_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ignore(_answer: Mapping[str, Any]) -> None:
        pass

    leases, slow = LeaseManager(Capacity(Resources(cpu=1.0))), anyio.Event()
    commands = PauseCommands(tmp_path, leases, anyio.lowlevel.checkpoint)

    async def run_in_slow_thread(store: Callable[[], None]) -> None:
        store()
        if load_pause(tmp_path):
            await slow.wait()

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_in_slow_thread)
    async with anyio.create_task_group() as tasks:
        for command in (commands.pause, commands.resume):
            tasks.start_soon(command, {}, ignore)
            await anyio.wait_all_tasks_blocked()
        slow.set()
    assert (load_pause(tmp_path), leases.is_paused) == (False, False)


async def test_a_work_directory_with_a_long_path_has_a_control_socket(with_server: Any) -> None:
    async with with_server("long" * 40) as path:
        assert "echo" in await anyio.to_thread.run_sync(ask_worker, path, "echo")
