"""Ports of the loopback interface, for tests that have to name one before anything listens there."""

from __future__ import annotations

import random
import socket
from typing import Final

_RANGE: Final = range(20_000, 32_000)
"""Below what systems give to sockets that name no port, so that nothing else takes a port before its test does."""


def free_port() -> int:
    """Return a TCP port on which nothing is listening; two calls rarely return the same one."""
    for port in random.SystemRandom().sample(_RANGE, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 100 in {_RANGE.start}..{_RANGE.stop}")
