"""Tells whether a client of the control socket is a process that the worker has confined.

The layer `landlock` refuses files, not connections to sockets. What it has confined can be told by its ``no_new_privs``
and its filters of system calls, which all its descendants keep.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import anyio.abc

from hypha_worker.bridge.unix_socket import peer_pid

_RESTRICTIONS: Final = re.compile(r"^(?:NoNewPrivs|Seccomp|Seccomp_filters):\s*(\d+)", re.MULTILINE)


def is_confined(stream: anyio.abc.SocketStream) -> bool:
    """Return whether a client is more confined than this process; False where the system does not say."""
    pid = peer_pid(stream.extra(anyio.abc.SocketAttribute.raw_socket))
    if not pid:  # the system does not say, or it is outside of this one's namespace, which no process of a job leaves
        return False
    try:
        restrictions = _read_restrictions(f"/proc/{pid}/status")
    except OSError:  # it has ended: nobody waits for an answer
        return True
    own = _read_restrictions("/proc/self/status")
    return any(theirs > ours for theirs, ours in zip(restrictions, own, strict=True))


def _read_restrictions(status: str) -> list[int]:
    return [int(value) for value in _RESTRICTIONS.findall(Path(status).read_text())]
