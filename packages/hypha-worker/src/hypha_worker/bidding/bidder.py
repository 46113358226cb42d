"""Listens for requests for workers, lets the arbiter decide, and sends offers.

Called by `service`, which runs it for as long as the worker is up. Calls `arbiter` with each batch of requests,
`leasing` to reserve what is offered, and `hypha_net.rpc` to send the offer to its scheduler.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation, pubsub, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerOffer
from hypha_worker.bidding.arbiter import Arbiter, PlannedOffer, ReceivedRequest, RequestBatch
from hypha_worker.leasing.expiry import expiry_fields
from hypha_worker.leasing.lease_manager import Lease, LeaseManager

_log = logging.getLogger(__name__)

OFFER_TIMEOUT: Final = 5.0
"""Seconds in which an offer must reach its scheduler."""
_REQUESTS: Final = instrumentation.Counter(
    "hypha.worker.requests", "{request}", "Requests decided, by whether an offer was made."
)


class Bidder:
    """Answers requests on the topic ``hypha/worker`` with offers."""

    def __init__(
        self, endpoint: Endpoint, arbiter: Arbiter, lease_manager: LeaseManager, sweep: Callable[[float], None]
    ) -> None:
        """Make a bidder.

        Args:
            endpoint: where requests arrive and offers are sent from.
            arbiter: decides which requests get an offer.
            lease_manager: reserves what is offered.
            sweep: ends leases that have expired, so that their resources can be offered again; gets the local clock.
        """
        self._endpoint = endpoint
        self._arbiter = arbiter
        self._lease_manager = lease_manager
        self._sweep = sweep
        self._batch = RequestBatch()
        self._changed = anyio.Event()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen for requests and answer them batch by batch, until cancelled."""
        async with pubsub.subscribe(self._endpoint, WORKER_REQUESTS) as messages, anyio.create_task_group() as tasks:
            tasks.start_soon(self._decide_batches, tasks)
            task_status.started()
            async for scheduler, request in messages:
                self._batch.add(ReceivedRequest(scheduler, request, anyio.current_time()))
                self._changed.set()

    async def _decide_batches(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            while (due := self._batch.seconds_until_due(anyio.current_time())) != 0.0:
                self._changed = anyio.Event()
                with anyio.move_on_after(due):
                    await self._changed.wait()
            now = anyio.current_time()
            self._sweep(now)
            batch = self._batch.drain()
            planned = self._arbiter.decide(batch, self._lease_manager.free, now, self._lease_manager.leased_requests)
            _log.debug("%d requests, %d offers", len(batch), len(planned))
            traces = _record_decisions(batch, planned, now)
            for plan in planned:
                lease = self._reserve(plan, now)
                tasks.start_soon(self._send_offer, lease, traces.get(lease.request_id))

    def _reserve(self, plan: PlannedOffer, now: float) -> Lease:
        received = plan.received_request
        return self._lease_manager.offer(
            uuid.uuid4(),
            received.scheduler,
            received.request.id,
            plan.allocation,
            plan.price,
            now,
            received.request.spec.executor,
        )

    async def _send_offer(self, lease: Lease, traceparent: str | None) -> None:
        timeout, timeout_ms = expiry_fields(lease.remaining(anyio.current_time()))
        offer = WorkerOffer(
            id=lease.id,
            request_id=lease.request_id,
            price=lease.price,
            resources=lease.allocation.resources,
            timeout=timeout,
            timeout_ms=timeout_ms,
        )
        try:
            with instrumentation.span("offer", {"hypha.price": lease.price}, parent=traceparent):
                await rpc.call(self._endpoint, lease.scheduler, OFFER, offer, timeout=OFFER_TIMEOUT)
        except NetError as error:
            self._lease_manager.cancel_offer(lease.id)
            _log.warning("offer for request %s did not reach %s: %s", lease.request_id, lease.scheduler, error)


def _record_decisions(
    batch: Sequence[ReceivedRequest], planned: Sequence[PlannedOffer], now: float
) -> dict[uuid.UUID, str | None]:
    """Record how requests were decided; return the ``traceparent`` that the offer to each request belongs to."""
    offered = {plan.received_request.request.id for plan in planned}
    traces: dict[uuid.UUID, str | None] = {}
    for received in batch:
        request = received.request
        _REQUESTS.add(1, {"hypha.offered": request.id in offered})
        about: instrumentation.Attributes = {"hypha.peer.id": str(received.scheduler), "hypha.bid": request.bid}
        parent, waited = instrumentation.trace_of(request), now - received.received_at
        with instrumentation.span("evaluate", about, parent=parent, kind="consumer", ago=waited) as span:
            span.set({"hypha.offered": request.id in offered})
        traces[request.id] = span.traceparent
    return traces
