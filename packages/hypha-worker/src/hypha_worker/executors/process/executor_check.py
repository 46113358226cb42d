"""Check of an executor before it is offered: its sandbox shows its command, and the owner's ``check`` passes there."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_proto.resources import Resources
from hypha_worker.errors import ExecutionError
from hypha_worker.executors.isolation.visible_paths import program_paths
from hypha_worker.executors.process.environment import SOCKET_PATH, WORK_DIR
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings, command_not_found
from hypha_worker.leasing.capacity import Allocation

CHECK_TIMEOUT: Final = 120.0
"""Seconds that the check of one executor may take."""
_STORAGE: Final = 10**9
_SCRIPT: Final = """
[ -x "$1" ] || { echo "command $1 cannot be run in its sandbox: name its folder in readable"; exit 1; }
shift
[ $# = 0 ] || exec "$@"
"""


async def find_fault(settings: ExecutorSection, host: HostSettings, work_dir: Path) -> str | None:
    """Return why an executor cannot start on this machine; None if it can, as far as its check tells.

    Args:
        settings: how it is started.
        host: what all executors share.
        work_dir: where the folder of the check is made, and removed.
    """
    found = settings.find_command()
    if found is None:
        return f"its command {command_not_found(str(settings.cmd))}"
    program = Path.cwd() / found
    shell = {  # it sees what the executor would see
        "cmd": "/bin/sh",
        "args": ["-c", _SCRIPT, "sh", str(program), *settings.check],
        "readable": [*settings.readable, *program_paths(program, settings.writable)],
    }
    checked = settings.model_copy(update=shell)
    make = partial(tempfile.mkdtemp, prefix="hypha-check-", dir=work_dir)
    folder = Path(await anyio.to_thread.run_sync(make))
    try:
        return await _run(checked, host, program, folder)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))


async def _run(settings: ExecutorSection, host: HostSettings, program: Path, folder: Path) -> str | None:
    socket = folder / "bridge.sock"  # the sandbox shows it, and nobody answers
    socket.touch()
    scope = anyio.CancelScope()
    place = ProcessPlace(folder, Allocation(Resources()), _STORAGE, scope, str(program), "check")
    runner = ProcessRunner(settings, host, place)
    what = f"its check ({shlex.join(settings.check)}) " if settings.check else ""
    try:
        with anyio.fail_after(CHECK_TIMEOUT), scope:
            await runner.run({SOCKET_PATH: str(socket), WORK_DIR: str(folder)})
    except TimeoutError:
        return f"{what}has not ended within {CHECK_TIMEOUT:g} s"
    except ExecutionError as error:
        last = runner.trace.last_lines[-1:]
        return f"{what and what + 'failed: '}{last[0] if last else error}"
    return None
