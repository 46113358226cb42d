"""Child processes, which end with their context and with this process, and commands of the executor in one process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.process_ready import is_alive

from hypha_local.errors import ProcessFailedError
from hypha_local.executor_session import ExecutorSession
from hypha_local.processes import child_environment, local_processes


async def test_no_child_outlives_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    children = []
    monkeypatch.setattr("hypha_local.processes.TERM_TIMEOUT", 0.5)
    with pytest.raises(RuntimeError):
        async with local_processes(tmp_path) as processes:
            for name, code in (("polite", "import time; time.sleep(60)"), ("stubborn", stubborn)):
                children.append(processes.start(name, [sys.executable, "-c", code]))
            while "up" not in children[1].log.read_text():
                await anyio.sleep(0.01)
            raise RuntimeError("the run fails")
    assert not any(is_alive(child.process.pid) for child in children)
    assert children[1].process.returncode == -signal.SIGKILL


async def test_early_exit_is_an_error_with_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match=r"(?s)node ended with status 1.*no certificate"):
        async with local_processes(tmp_path) as processes:
            processes.start("node", [sys.executable, "-c", "import sys; sys.exit('no certificate')"])
            await processes.watch(["node"])


async def test_timeout_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match="slow was not done within"):
        async with local_processes(tmp_path) as processes:
            await processes.run("slow", [sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.3)


def test_children_do_not_inherit_configuration_variables() -> None:
    kept = child_environment({"PATH": "/bin", "HYPHA_KEY_PEM": "x", "OTEL_SERVICE_NAME": "y", "HOME": "/h"})
    assert kept == {"PATH": "/bin", "HOME": "/h"}


def test_children_are_terminated_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from hypha_local.processes import Processes\n"
        "child = Processes(Path(sys.argv[1])).start('child', [sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    while is_alive(child):
        time.sleep(0.02)


PROGRAM = """
import json, os, sys, time
for line in sys.stdin:
    match json.loads(line):
        case ["fail", reason]:
            print(json.dumps({"status": 2, "output": reason}), flush=True)
        case ["exit", reason]:
            sys.exit(reason)
        case ["hang"]:
            time.sleep(60)
        case [name]:
            print(json.dumps({"status": 0, "output": f"{name} {os.getpid()}"}), flush=True)
"""


@asynccontextmanager
async def open_session(folder: Path) -> AsyncIterator[ExecutorSession]:
    async with local_processes(folder) as processes:
        with anyio.fail_after(60):
            yield ExecutorSession(processes, [sys.executable, "-c", PROGRAM])


async def test_commands_are_executed_by_one_process(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        first = (await session.run(["create"], timeout=30)).split()
        with pytest.raises(ProcessFailedError, match="fail ended with status 2: no such model"):
            await session.run(["fail", "no such model"], timeout=30)
        second = (await session.run(["evaluate"], timeout=30)).split()
        assert (first[0], second[0]) == ("create", "evaluate")
        assert first[1] == second[1]


async def test_commands_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:

        async def ask(name: str) -> None:
            assert (await session.run([name], timeout=30)).split()[0] == name

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(ask, f"command-{number}")


async def test_a_process_that_ended_is_replaced(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        first = await session.run(["evaluate"], timeout=30)
        with pytest.raises(ProcessFailedError, match=r"(?s)exit ended with status 1; its last.*:\nout of memory"):
            await session.run(["exit", "out of memory"], timeout=30)
        assert await session.run(["evaluate"], timeout=30) != first


async def test_a_command_that_takes_too_long_is_killed_and_answers_no_other(tmp_path: Path) -> None:
    async with open_session(tmp_path) as session:
        with pytest.raises(ProcessFailedError, match=r"hang was not done within 0\.3 s"):
            await session.run(["hang"], timeout=0.3)
        assert (await session.run(["evaluate"], timeout=30)).startswith("evaluate")
