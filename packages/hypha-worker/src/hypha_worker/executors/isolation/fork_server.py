"""Starts executors' processes by forking: a Python interpreter that is there already replaces one for each start.

Run as a script by `process.fork_server_client`, which it serves until its socket closes or the worker ends. It has one
thread, so that what it forks may run Python; each child carries out the steps of `launcher` and becomes the command.

Requests are packets on a SOCK_SEQPACKET socket:

- ``start`` with descriptors: a memory file with the `marshal` of a start (see `_become`), the write end of a pipe that
  gets the status of the process, its output, and what it inherits. The answer is its id, as text.
- ``reap PID``: its status was read, and its id may be used again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import marshal
import os
import select
import signal
import socket
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any, NoReturn

MAX_DESCRIPTORS = 64
"""Maximum number of descriptors in a request."""
_MAX_PACKET = 64
_FIRST_FREE = 3
"""Received descriptors are moved to this number, behind the standard streams, or to one above those of the steps."""


def main(control: socket.socket, launcher: ModuleType) -> NoReturn:
    """Serve requests until the other end is closed."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    """Pipe for the status of each process whose end was not reported."""
    sources: list[socket.socket | int] = [control, reader]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if reader in readable:
            os.read(reader, 4096)
            _report_ends(running)
        if control in readable:
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_PACKET, MAX_DESCRIPTORS)
            for descriptor in descriptors:  # it ignores MSG_CMSG_CLOEXEC
                os.set_inheritable(descriptor, False)
            if not message:
                os._exit(0)
            _handle(control, message, descriptors, running, launcher)


def _handle(
    control: socket.socket, message: bytes, descriptors: list[int], running: dict[int, int], launcher: ModuleType
) -> None:
    if message.startswith(b"reap "):
        os.waitpid(int(message[5:]), 0)
        return
    description, status, *passed = descriptors
    pid = os.fork()
    if pid == 0:
        _become(_read(description), passed, launcher)
    running[pid] = status
    for descriptor in (description, *passed):
        os.close(descriptor)
    control.send(b"%d" % pid)
    _report_ends(running)  # of one whose signal came before it was entered


def _report_ends(running: dict[int, int]) -> None:
    """Write the status of processes that have ended; they stay zombies, whose ids are not used again."""
    for pid, pipe in list(running.items()):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            continue
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        try:
            os.write(pipe, b"%d" % code)
        except BrokenPipeError:  # the worker has ended
            os._exit(0)
        os.close(running.pop(pid))


def _read(description: int) -> dict[str, Any]:
    size = os.fstat(description).st_size
    content: dict[str, Any] = marshal.loads(os.pread(description, size, 0))
    return content


def _become(start: dict[str, Any], passed: Sequence[int], launcher: ModuleType) -> NoReturn:
    """Become the process.

    Args:
        start: ``steps`` of `launcher`, ``command``, ``env``, ``cwd``, ``numbers`` of the descriptors that it inherits.
        passed: its output, and these descriptors.
        launcher: the module.
    """
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        free = max([_FIRST_FREE, *(number + 1 for number in start["numbers"])])
        output, *inherited = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in passed]
        for target in (1, 2):
            os.dup2(output, target)
        for descriptor, number in zip(inherited, start["numbers"], strict=True):
            os.dup2(descriptor, number)
        os.chdir(start["cwd"])
        launcher.carry_out(start["steps"], start["command"], start["env"])
    except (OSError, ValueError) as error:
        launcher.give_up(error)
    finally:
        os._exit(1)  # whatever was raised: this process must not serve requests


def _load_launcher() -> ModuleType:
    """Return the module `launcher`, whose package is not imported: neither is it needed, nor on the path."""
    path = Path(__file__).with_name("launcher.py")
    spec = importlib.util.spec_from_file_location("launcher", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    import ctypes  # noqa: F401  # for the steps of every child

    loaded = _load_launcher()
    loaded.end_with_parent(int(sys.argv[2]))
    served = socket.socket(fileno=int(sys.argv[1]))
    served.set_inheritable(False)
    main(served, loaded)
