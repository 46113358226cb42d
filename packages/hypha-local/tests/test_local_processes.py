"""Child processes: they end with their context and with this process, and failures are reported."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
from support.liveness import is_alive

from hypha_local.errors import ProcessFailedError
from hypha_local.processes import child_environment, local_processes


def test_no_child_outlives_its_context(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    children = []

    async def main() -> None:
        async with local_processes(tmp_path) as processes:
            for name, code in (("polite", "import time; time.sleep(60)"), ("stubborn", stubborn)):
                children.append(processes.start(name, [sys.executable, "-c", code]))
            while "up" not in children[1].last_lines():
                await anyio.sleep(0.01)
            raise RuntimeError("the run fails")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("hypha_local.processes.TERM_TIMEOUT", 0.5)
        anyio.run(main, backend="trio")
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
