"""What py-libp2p logs, one line a record, under our name and for debugging only.

It logs tracebacks for peers that leave and errors for attempts that fail. What of that concerns anybody is raised or
logged by `connections`, `security` and `dialer`, with the reason; only critical records pass as they are.
"""

from __future__ import annotations

import logging
from typing import Final

from libp2p.network.connection import swarm_connection

_log: Final = logging.getLogger("hypha_net.libp2p")


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        level = logging.CRITICAL if record.levelno >= logging.CRITICAL else logging.DEBUG
        error = record.exc_info[1] if record.exc_info else None
        first = record.getMessage().strip().partition("\n")[0]
        _log.log(level, "%s: %s", record.name, f"{first}: {error!r}" if error is not None else first)


def adopt_library_logs() -> None:
    """Take the library's records over, for every program that opens an endpoint. Idempotent."""
    library = logging.getLogger("libp2p")
    if not any(isinstance(handler, _OneLine) for handler in library.handlers):
        library.handlers[:] = [_OneLine(logging.WARNING)]
    library.setLevel(logging.WARNING)  # building the records below that costs time, and nobody wants them
    library.propagate = False
    # this module logs to the root logger, whose functions install a handler of their own where there is none
    vars(swarm_connection)["logging"] = logging.getLogger("libp2p.network.swarm_connection")
