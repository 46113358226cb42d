"""Lease renewal: renews the leases of a job when they are due, and reports those that are lost.

Started by `jobs.runner`. `leases` decides what is due; this module does the I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, NotRunningError
from hypha_scheduler.allocation.allocator import renew
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases

_log = logging.getLogger(__name__)

_CHECK_INTERVAL: Final = 0.25
_RENEWAL_TIMEOUT: Final = 2.5
"""Timeout of one renewal in seconds; short enough to try again if the connection is dead."""
_HELD: Final = instrumentation.UpDownCounter("hypha.scheduler.leases.active", "{lease}", "Leases that a job holds.")
_RENEWALS: Final = instrumentation.Counter("hypha.scheduler.lease.renewals", "{renewal}", "Renewals, by outcome.")
OnLost = Callable[[HeldLease, str], None]


async def renew_leases(endpoint: Endpoint, leases: HeldLeases, on_lost: OnLost) -> None:
    """Renew `leases` until cancelled; call `on_lost(lease, why)` for each that is lost."""
    with instrumentation.attached(None):  # renewals would flood the job's trace
        await _renew_until_cancelled(endpoint, leases, on_lost)


async def _renew_until_cancelled(endpoint: Endpoint, leases: HeldLeases, on_lost: OnLost) -> None:
    held_before = 0
    try:
        async with anyio.create_task_group() as tasks:
            while True:
                _HELD.add(len(leases) - held_before)
                held_before = len(leases)
                now = anyio.current_time()
                for held in leases.expire(now):
                    _RENEWALS.add(1, {"hypha.outcome": "expired"})
                    on_lost(held, "its lease ran out before the worker answered a renewal")
                for held in leases.begin_renewals(now):
                    tasks.start_soon(_renew_lease, endpoint, leases, held, on_lost)
                await anyio.sleep(_CHECK_INTERVAL)
    finally:
        _HELD.add(-held_before)


async def _renew_lease(endpoint: Endpoint, leases: HeldLeases, held: HeldLease, on_lost: OnLost) -> None:
    asked_at = anyio.current_time()
    timeout = min(_RENEWAL_TIMEOUT, max(0.5, held.expires - asked_at))
    try:
        life = await renew(endpoint, held.peer, held.lease, timeout)
    except NotRunningError as error:
        if leases.drop(held.lease) is not None:
            _log.info("the worker of a lease has ended: %s", error)
            _RENEWALS.add(1, {"hypha.outcome": "unanswered"})
            on_lost(held, "its worker has ended: nothing listens at its addresses")
        return
    except NetError as error:
        if held.lease not in leases:
            return  # released, or its worker has said goodbye
        _log.warning("lease at %s could not be renewed, retrying: %s", held.peer, error)
        _RENEWALS.add(1, {"hypha.outcome": "unanswered"})
        leases.schedule_retry(held.lease, anyio.current_time())
        return
    if held.lease not in leases:
        return  # released or expired before the response arrived
    _RENEWALS.add(1, {"hypha.outcome": "refused" if life is None else "renewed"})
    if life is None:
        leases.drop(held.lease)
        on_lost(held, "the worker no longer has its lease")
    else:
        leases.record_renewal(held.lease, held.peer, asked_at, life)
