"""The end of a process tree: which processes belong to it, and those that survive SIGKILL, as on a stuck device."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from typing import Any

import anyio
import psutil
import pytest

from hypha_worker.executors.process import process_tree
from hypha_worker.executors.process.process_tree import TOKEN_VARIABLE, terminate_tree

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
LEAVES_ANOTHER = """
import subprocess, sys
sleeper = [sys.executable, "-I", "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
left = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.PIPE)
left.stdout.readline()
print(left.pid, flush=True)
"""


@pytest.mark.parametrize(("token", "size"), [("t", 0), ("t", 100_000), ("other", 0), ("tt", 0), ("", 0)])
def test_a_process_in_a_session_of_its_own_is_found_by_its_token(token: str, size: int) -> None:
    """The token may stand behind much else; another job's token, even one that begins like it, does not count."""
    environment = {"A": "x" * size, "B": f"{TOKEN_VARIABLE}=t", **os.environ, TOKEN_VARIABLE: token}

    async def main() -> int:
        with anyio.fail_after(30):
            process = await anyio.open_process(
                [sys.executable, "-c", LEAVES_ANOTHER], env=environment, start_new_session=True
            )
            assert process.stdout is not None
            left = int(await process.stdout.receive())
            await process.wait()
            await terminate_tree(process, "t", 5.0)
            await process.aclose()
            return left

    left = anyio.run(main, backend="trio")
    try:
        ended = not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        assert ended is (token == "t")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("dies_late", [False, True])
def test_processes_that_survive_sigkill_are_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies_late: bool
) -> None:
    monkeypatch.setattr(process_tree, "KILL_GRACE", 0.1)
    kill, deliver = os.killpg, anyio.Event()

    def hold_back(group: int, number: int) -> None:
        if number == signal.SIGKILL:
            deliver.set()

    async def main() -> int:
        with anyio.fail_after(30):
            process = await anyio.open_process(
                SLEEPER, env=os.environ | {TOKEN_VARIABLE: "t"}, start_new_session=True, stdin=None
            )

            async def die_late() -> None:
                await deliver.wait()
                while "of a job live" not in caplog.text:
                    await anyio.sleep(0.01)
                if dies_late:
                    kill(process.pid, signal.SIGKILL)

            monkeypatch.setattr(os, "killpg", hold_back)
            monkeypatch.setattr(psutil.Process, "send_signal", lambda *_: None)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(die_late)
                    await terminate_tree(process, "t", 0.05, 20.0 if dies_late else 0.5)
                    ended: Any = process.returncode is not None
                    assert ended is dies_late
            finally:
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
                await process.wait()
            return process.pid

    pid = anyio.run(main, backend="trio")
    assert re.search(rf"processes {pid} of a job live 0.1 s after SIGKILL", caplog.text)
    assert ("are given up" in caplog.text) is not dies_late
