"""Ports of the loopback interface, for tests that have to name one before anything listens there."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port on which nothing listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
