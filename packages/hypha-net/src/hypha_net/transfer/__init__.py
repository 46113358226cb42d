"""Transfer of files and bytes between peers: push and pull with length and digest, in bounded memory, resumable.

Content is visible only when it is complete. A header announces name, length and digest, and a receipt ends a push
(`hypha_proto.transfer`). Content is received into a file; the sender may send a file or bytes in memory.

`pull_client`, `pull_server`, `push_client` and `push_server` run the two protocols; `framing` sends and receives their
headers. `progress` emits the events, and resumes what was interrupted. The bytes themselves are moved by `io`:
`sources`, `stream_copy`, `partial_file` and `integrity`.
"""

from hypha_net.bandwidth import MIN_RATE, BandwidthLimits, limit_bandwidth
from hypha_net.errors import TransferError, TransferRefusedError
from hypha_net.transfer.framing import IDLE_TIMEOUT
from hypha_net.transfer.io.partial_file import StorageQuota
from hypha_net.transfer.io.sources import Content, describe
from hypha_net.transfer.pull_client import PullResult, announced_content, pull, pull_range
from hypha_net.transfer.pull_server import PullSource, serve_pulls
from hypha_net.transfer.push_client import push
from hypha_net.transfer.push_server import FilePushTarget, serve_pushes

__all__ = [
    "IDLE_TIMEOUT",
    "MIN_RATE",
    "BandwidthLimits",
    "Content",
    "FilePushTarget",
    "PullResult",
    "PullSource",
    "StorageQuota",
    "TransferError",
    "TransferRefusedError",
    "announced_content",
    "describe",
    "limit_bandwidth",
    "pull",
    "pull_range",
    "push",
    "serve_pulls",
    "serve_pushes",
]
