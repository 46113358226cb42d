"""Bounded retries of requests and transfers that may fail for a moment.

Called by every module that asks a peer for something: `peer_files`, `bridge.backend`, `jobs.job_manager` and the
parameter server. Calls `hypha_net.rpc`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from hypha_net import backoff, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, TransferRefusedError, UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import RpcMethod

_log = logging.getLogger(__name__)

T = TypeVar("T")
Req = TypeVar("Req")
Resp = TypeVar("Resp")

RETRY_DELAYS: Final = (0.0, 0.25, 1.0, 3.0)
"""Seconds before each attempt, of which the first is immediate, at an operation that may fail for a moment."""
REPORT_DELAYS: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt at a report: no job is lost while its scheduler is unreachable for 15 seconds."""


async def retry(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    delays: Sequence[float] = RETRY_DELAYS,
    final: tuple[type[NetError], ...] = (),
) -> T:
    """Call `attempt` until it succeeds, once per delay; the first attempt is immediate. A refusal is final.

    Args:
        what: the attempt, for the log.
        attempt: what is tried.
        delays: seconds before each attempt.
        final: further errors that are not retried.

    Raises:
        NetError: the error of the last attempt.
    """
    failures = 0

    def on_failure(error: NetError, _pause: float) -> None:
        nonlocal failures
        if isinstance(error, (TransferRefusedError, UnsupportedProtocolError, *final)):
            raise error
        failures += 1
        _log.info("%s failed (%s), attempt %d of %d", what, error, failures, len(delays))

    return await backoff.retry(attempt, delays[1:], on_failure)


async def call_with_retries(
    endpoint: Endpoint,
    peer: PeerId,
    method: RpcMethod[Req, Resp],
    message: Req,
    *,
    timeout: float = 10.0,
    delays: Sequence[float] = RETRY_DELAYS,
    final: tuple[type[NetError], ...] = (),
) -> Resp:
    """Call `rpc.call` with bounded retries, as `retry` does. Raises `NetError`."""
    what = f"{method.variant or method.protocol} to {peer}"
    return await retry(what, lambda: rpc.call(endpoint, peer, method, message, timeout=timeout), delays, final)
