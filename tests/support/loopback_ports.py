"""Free ports of the loopback interface, for tests that must name a port before anything listens on it."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a TCP port on which nothing is listening."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
