"""Move files: push and pull with length and digest, bounded in memory, visible only when whole, taken up after a cut.

Between our own nodes a header says what moves, how long it is and what it hashes to, and a receipt ends a push. A peer
of the old wire knows neither: then the file is what came before the clean end of the stream (`hypha_proto.transfer`).
Before this room: `requests` told the peers what to expect. After it: the bridge, the parameter server, the result.

Inside: `push` and `pull` hold the conversations, `wire` their headers and ends, `moving` the bytes, `arriving` the
incomplete file, `behind` the thread for the disk, `progress` the events, `retries` the patience.
"""

from hypha_net.errors import TransferError, TransferRefusedError
from hypha_net.rates import MIN_RATE, Rates, limit_rates
from hypha_net.transfer.pull import Offered, Pulled, describe, pull, serve_pulls
from hypha_net.transfer.push import Landing, push, serve_pushes
from hypha_net.transfer.wire import IDLE_TIMEOUT

__all__ = [
    "IDLE_TIMEOUT",
    "MIN_RATE",
    "Landing",
    "Offered",
    "Pulled",
    "Rates",
    "TransferError",
    "TransferRefusedError",
    "describe",
    "limit_rates",
    "pull",
    "push",
    "serve_pulls",
    "serve_pushes",
]
