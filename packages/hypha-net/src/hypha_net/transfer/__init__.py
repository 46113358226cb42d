"""Move files and buffers: push and pull with length and digest, bounded memory, visible only when whole, taken up after
a cut.

Between our own nodes a header says what moves, how long it is and what it hashes to, and a receipt ends a push. A peer
of the old wire knows neither: then the content is what came before the clean end of the stream
(`hypha_proto.transfer`). Whether bytes come from a file or from memory, and where they go, is each end's own business.
Before this room: `requests` told the peers what to expect. After it: the bridge, the parameter server, the result.

Inside: `push` and `pull` hold the conversations, `wire` their headers and ends, `sources` and `destinations` where the
bytes come from and go, `moving` the bytes, `arriving` the incomplete file and `gathering` the incomplete buffer,
`landing` and `holding` what a push may write, `behind` the thread for the disk, `progress` the events, `retries` the
patience.
"""

from hypha_net.bandwidth import MIN_RATE, BandwidthLimits, limit_bandwidth
from hypha_net.errors import TransferError, TransferRefusedError
from hypha_net.transfer.framing import IDLE_TIMEOUT
from hypha_net.transfer.io.sources import Buffer, describe
from hypha_net.transfer.pull import PullResult, PullSource, pull, pull_bytes, serve_pulls
from hypha_net.transfer.push import push, serve_pushes
from hypha_net.transfer.push_target import FilePushTarget, MemoryPushTarget

__all__ = [
    "IDLE_TIMEOUT",
    "MIN_RATE",
    "BandwidthLimits",
    "Buffer",
    "FilePushTarget",
    "MemoryPushTarget",
    "PullResult",
    "PullSource",
    "TransferError",
    "TransferRefusedError",
    "describe",
    "limit_bandwidth",
    "pull",
    "pull_bytes",
    "push",
    "serve_pulls",
    "serve_pushes",
]
