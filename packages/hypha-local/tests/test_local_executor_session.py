"""Commands of the executor in one process: in turn, with their failures, and again after the process has ended."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hypha_local.errors import ProcessFailedError
from hypha_local.executor_session import ExecutorSession
from hypha_local.processes import local_processes

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


def _run(folder: Path, work: Callable[[ExecutorSession], Awaitable[None]]) -> None:
    async def main() -> None:
        async with local_processes(folder) as processes:
            with anyio.fail_after(60):
                await work(ExecutorSession(processes, folder, [sys.executable, "-c", PROGRAM]))

    anyio.run(main, backend="trio")


def test_commands_are_executed_by_one_process(tmp_path: Path) -> None:
    async def work(session: ExecutorSession) -> None:
        first = (await session.run(["create"], timeout=30)).split()
        with pytest.raises(ProcessFailedError, match="fail ended with status 2: no such model"):
            await session.run(["fail", "no such model"], timeout=30)
        second = (await session.run(["evaluate"], timeout=30)).split()
        assert (first[0], second[0]) == ("create", "evaluate")
        assert first[1] == second[1]

    _run(tmp_path, work)


def test_commands_at_the_same_time_get_their_own_answers(tmp_path: Path) -> None:
    async def work(session: ExecutorSession) -> None:
        async def ask(name: str) -> None:
            assert (await session.run([name], timeout=30)).split()[0] == name

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(ask, f"command-{number}")

    _run(tmp_path, work)


def test_a_process_that_ended_is_replaced(tmp_path: Path) -> None:
    async def work(session: ExecutorSession) -> None:
        first = await session.run(["evaluate"], timeout=30)
        with pytest.raises(ProcessFailedError, match=r"(?s)exit ended with status 1; its last lines:\nout of memory"):
            await session.run(["exit", "out of memory"], timeout=30)
        assert await session.run(["evaluate"], timeout=30) != first

    _run(tmp_path, work)


def test_a_command_that_takes_too_long_is_killed_and_answers_no_other(tmp_path: Path) -> None:
    async def work(session: ExecutorSession) -> None:
        with pytest.raises(ProcessFailedError, match=r"hang was not done within 0\.3 s"):
            await session.run(["hang"], timeout=0.3)
        assert (await session.run(["evaluate"], timeout=30)).startswith("evaluate")

    _run(tmp_path, work)
