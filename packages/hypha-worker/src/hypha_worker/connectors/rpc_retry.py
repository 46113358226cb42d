"""Bounded retries of requests and transfers that may fail for a moment.

What a job asks its scheduler goes through `scheduler_contact`, which knows how long the job may
wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import anyio

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
OUTAGE_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts during an outage that a job waits out, with jitter; the last repeats."""


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


async def retry_through_outage(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    *,
    until: Callable[[], bool],
    confirmed: Callable[[], bool] = lambda: True,
    is_refusal: Callable[[T], bool] = lambda _answer: False,
    delays: Sequence[float] = REPORT_DELAYS,
    final: tuple[type[NetError], ...] = (),
) -> T:
    """Call `attempt` until it succeeds: as often as `retry` does, and besides while `until` returns False.

    A scheduler that was started again answers before it has taken its jobs up: until `confirmed`, neither a refusal
    nor a protocol that it does not speak is its last word.

    Args:
        what: the attempt, for the log.
        attempt: what is tried.
        until: returns whether there is no outage (any longer) that the job may wait out; always True for a job that
            ends with its lease.
        confirmed: returns whether the scheduler is known to run the job.
        is_refusal: returns whether an answer refuses the request because of the state of the job.
        delays: seconds before each of the attempts that are made without an outage, and after one.
        final: further errors that are not retried.

    Raises:
        NetError: the error of the last attempt.
    """
    attempts = failures = 0
    while True:
        is_last_word = confirmed() or until()  # as it is asked: what changes meanwhile does not change the answer
        try:
            answer = await attempt()
            if not is_refusal(answer) or is_last_word:
                return answer
            problem = "it has not taken up the job yet"
        except NetError as error:
            failures = failures + 1 if until() else 0
            is_final = isinstance(error, (TransferRefusedError, UnsupportedProtocolError, *final))
            if failures >= len(delays) or (is_final and (confirmed() or until())):
                raise
            problem = str(error)
        pause = backoff.jittered(OUTAGE_PAUSES, attempts) if not failures else delays[failures]
        level = logging.INFO if attempts < len(OUTAGE_PAUSES) else logging.DEBUG
        _log.log(level, "%s failed (%s), again in %.1f s", what, problem, pause)
        attempts += 1
        await anyio.sleep(pause)


async def call_through_outage(
    endpoint: Endpoint,
    scheduler: PeerId,
    method: RpcMethod[Req, Resp],
    request: Req,
    *,
    until: Callable[[], bool],
    confirmed: Callable[[], bool] = lambda: True,
    is_refusal: Callable[[Resp], bool] = lambda _answer: False,
    timeout: float = 30.0,
    delays: Sequence[float] = REPORT_DELAYS,
    final: tuple[type[NetError], ...] = (),
) -> Resp:
    """Call `rpc.call`, which dials the scheduler where it was known if needed, as `retry_through_outage` does.

    The request must carry an idempotency key if it may not count twice. Raises `NetError`.
    """

    async def attempt() -> Resp:
        return await rpc.call(endpoint, scheduler, method, request, timeout=timeout)

    what = f"{method.variant or method.protocol} to {scheduler}"
    return await retry_through_outage(
        what, attempt, until=until, confirmed=confirmed, is_refusal=is_refusal, delays=delays, final=final
    )
