"""What py-libp2p logs, one line a record and under our name: its tracebacks tell of the library, not of the network.

What the library says about a connection that failed is left out: `connections` and `security` have said it already,
with the reason.
"""

from __future__ import annotations

import logging
from typing import Final

from libp2p.network.connection import swarm_connection

_log = logging.getLogger("hypha_net.libp2p")
_TOLD_ELSEWHERE: Final = ("[ADDCONN_FAIL]",)


class _OneLine(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        level = logging.DEBUG if text.startswith(_TOLD_ELSEWHERE) else record.levelno
        error = record.exc_info[1] if record.exc_info else None
        first = text.strip().partition("\n")[0]
        _log.log(level, "%s: %s", record.name, f"{first}: {error!r}" if error is not None else first)


def adopt_library_logs() -> None:
    """Take over the library's warnings and errors. Idempotent."""
    library = logging.getLogger("libp2p")
    if not any(isinstance(handler, _OneLine) for handler in library.handlers):
        library.addHandler(_OneLine(logging.WARNING))
        library.propagate = False
    # this module logs to the root logger, whose functions install a handler of their own where there is none
    vars(swarm_connection)["logging"] = logging.getLogger("libp2p.network.swarm_connection")
