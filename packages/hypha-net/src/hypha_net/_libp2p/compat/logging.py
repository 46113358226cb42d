"""Reroute py-libp2p's log records to the logger ``hypha_net.libp2p``: one line each, at DEBUG unless critical.

py-libp2p logs tracebacks for peers that leave, and errors for attempts that fail. What matters of that to
operators is raised or logged by `dial` and `security`, with the reason.
"""

from __future__ import annotations

import logging
from typing import Final

from libp2p.network.connection import swarm_connection

_log: Final = logging.getLogger("hypha_net.libp2p")


class _OneLineHandler(logging.Handler):
    """Forwards the first line of a record and its exception."""

    def emit(self, record: logging.LogRecord) -> None:
        level = logging.CRITICAL if record.levelno >= logging.CRITICAL else logging.DEBUG
        error = record.exc_info[1] if record.exc_info else None
        first = record.getMessage().strip().partition("\n")[0]
        _log.log(level, "%s: %s", record.name, f"{first}: {error!r}" if error is not None else first)


def adopt_library_logs() -> None:
    """Install the handler on py-libp2p's logger; called for every endpoint. Idempotent."""
    library = logging.getLogger("libp2p")
    if not any(isinstance(handler, _OneLineHandler) for handler in library.handlers):
        library.handlers[:] = [_OneLineHandler(logging.WARNING)]
    library.setLevel(logging.WARNING)  # lower records cost time and are dropped anyway
    library.propagate = False
    # this module logs through the functions of `logging`, which install a handler on a root logger without one
    vars(swarm_connection)["logging"] = logging.getLogger("libp2p.network.swarm_connection")
