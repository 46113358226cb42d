"""Whether processes live, asked without a race against their end."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process | int) -> bool:
    """Return whether a process, or the one of an id, has not ended; one that nobody has waited for has."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
