"""Listens for requests for workers, and sends the offers that are decided.

`request_queue` decides, `leasing` reserves what is offered, and `hypha_net.rpc` sends the offer to its scheduler. The
reservation is provisional until the connection to the scheduler stands; from then on the offer lives for as long as the
link needs.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation, pubsub, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnreachableError
from hypha_net.log_throttle import LogThrottle
from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerOffer
from hypha_worker.bidding.arbiter import Arbiter, PlannedOffer
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.bidding.request_history import RequestHistory, explain_refusal
from hypha_worker.bidding.request_queue import Decision, RequestQueue
from hypha_worker.leasing.lease_manager import Lease, LeaseError, LeaseManager

_log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT: Final = 10.0
"""Seconds that an attempt to connect to a scheduler may take, beyond the offer that waits for it."""
DIAL_TIMEOUT: Final = 2.0
"""Seconds in which the scheduler of an offer must be connected; its resources are reserved meanwhile."""
_DIAL_MARGIN: Final = 0.25
"""Seconds for which a reservation outlasts the dial, which cancels it: it must be there when the dial has succeeded."""
ACKNOWLEDGE_TIMEOUT: Final = 5.0
"""Seconds in which a scheduler must acknowledge an offer. The offer itself may end earlier."""
_REQUESTS: Final = instrumentation.Counter(
    "hypha.worker.requests", "{request}", "Requests decided, by whether an offer was made."
)


@dataclass(slots=True)
class Bidder:
    """Answers requests on the topic ``hypha/worker`` with offers."""

    endpoint: Endpoint
    """Where requests arrive and offers are sent from."""
    arbiter: Arbiter
    """Decides which requests get an offer."""
    lease_manager: LeaseManager
    """Reserves what is offered."""
    sweep: Callable[[float], None]
    """Ends leases that have expired, so that their resources can be offered again; gets the local clock."""
    history: RequestHistory = field(default_factory=RequestHistory)
    """Keeps what was decided, for the owner."""
    _queue: RequestQueue = field(init=False)
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _failures: LogThrottle = field(default_factory=LogThrottle)

    def __post_init__(self) -> None:
        self._queue = RequestQueue(self.arbiter, self.lease_manager)
        self.lease_manager.on_freed = self._note_freed

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen for requests and answer them, until cancelled."""
        async with pubsub.subscribe(self.endpoint, WORKER_REQUESTS) as messages, anyio.create_task_group() as tasks:
            tasks.start_soon(self._decide_requests, tasks)
            task_status.started()
            async for scheduler, request in messages:
                self._queue.batch.add(ReceivedRequest(scheduler, request, anyio.current_time()))
                self._changed.set()

    def _note_freed(self) -> None:
        self._queue.is_freed = True
        self._changed.set()

    async def _decide_requests(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            while (due := self._queue.seconds_until_due(anyio.current_time())) != 0.0:
                self._changed = anyio.Event()
                with anyio.move_on_after(due):
                    await self._changed.wait()
            now = anyio.current_time()
            self.sweep(now)
            decision = self._queue.decide(now)
            _log.debug("%d requests, %d offers", len(decision.requests), len(decision.offers))
            traces = _record_decision(decision, now)
            for plan in decision.offers:
                lease = self._reserve(plan, now)
                self.history.note_offer(plan.received_request, plan.price)
                tasks.start_soon(self._send_offer, lease, tasks, traces.get((lease.scheduler, lease.request_id)))

            self._note_refusals(decision)

    def _note_refusals(self, decision: Decision) -> None:
        offered = {plan.received_request.key for plan in decision.offers}
        for received in decision.requests:
            if received.key not in offered:
                self.history.note_refusal(received, explain_refusal(self.arbiter, self.lease_manager, received))

    def _reserve(self, plan: PlannedOffer, now: float) -> Lease:
        received = plan.received_request
        lease = Lease(
            uuid.uuid4(),
            received.scheduler,
            received.request.id,
            plan.allocation,
            plan.price,
            expires=now + DIAL_TIMEOUT + _DIAL_MARGIN,
            executors=received.request.spec.executor,
        )
        self.lease_manager.offer(lease)
        return lease

    async def _send_offer(self, lease: Lease, tasks: anyio.abc.TaskGroup, traceparent: str | None) -> None:
        try:
            with instrumentation.span("offer", {"hypha.price": lease.price}, parent=traceparent):
                await self._connect(lease.scheduler, tasks)
                now, round_trip = anyio.current_time(), self.endpoint.round_trip_time(lease.scheduler)
                self.lease_manager.start_offer(lease.id, now, round_trip)
                offer = _make_offer(lease, lease.remaining(now))
                await rpc.call(self.endpoint, lease.scheduler, OFFER, offer, timeout=ACKNOWLEDGE_TIMEOUT)
        except (NetError, LeaseError) as error:
            self._queue.deferred.forget(lease.scheduler)
            self.lease_manager.cancel_offer(lease.id)
            self._log_failure(lease, error)

    async def _connect(self, scheduler: PeerId, tasks: anyio.abc.TaskGroup) -> None:
        """Return when a scheduler is connected, and the round trip is measured if that is done in time.

        The attempt goes on in `tasks` after `DIAL_TIMEOUT`: a handshake over a long link takes longer than resources
        stay reserved for an offer, and the scheduler's next request finds the connection.

        Raises:
            UnreachableError: there is no connection within `DIAL_TIMEOUT`.
        """
        if self.endpoint.round_trip_time(scheduler) is not None:
            return
        done, failures = anyio.Event(), [f"{scheduler} is not connected after {DIAL_TIMEOUT:g} s"]

        async def attempt() -> None:
            try:
                await self.endpoint.connect_peer(scheduler, timeout=ATTEMPT_TIMEOUT)
            except NetError as error:
                failures.append(str(error))
            done.set()

        tasks.start_soon(attempt)
        with anyio.move_on_after(DIAL_TIMEOUT):
            await done.wait()
        if self.endpoint.round_trip_time(scheduler) is None and scheduler not in self.endpoint.connected_peers():
            raise UnreachableError(failures[-1])

    def _log_failure(self, lease: Lease, error: Exception) -> None:
        text, scheduler = "offer for request %s did not reach %s: %s", lease.scheduler
        self._failures.log(_log, logging.WARNING, scheduler, text, lease.request_id, scheduler, error)


def _make_offer(lease: Lease, life: float) -> WorkerOffer:
    return WorkerOffer(
        id=lease.id,
        request_id=lease.request_id,
        price=lease.price,
        resources=lease.allocation.resources,
        timeout_ms=int(life * 1000),
    )


def _record_decision(decision: Decision, now: float) -> dict[tuple[PeerId, uuid.UUID], str | None]:
    """Record how requests were decided; return the ``traceparent`` that the offer to each request belongs to."""
    offered = {plan.received_request.key for plan in decision.offers}
    traces: dict[tuple[PeerId, uuid.UUID], str | None] = {}
    for received in decision.requests:
        request = received.request
        _REQUESTS.add(1, {"hypha.offered": received.key in offered})
        about: instrumentation.Attributes = {"hypha.peer.id": str(received.scheduler), "hypha.bid": request.bid}
        parent, waited = instrumentation.trace_of(request), now - received.received_at
        kind = instrumentation.SpanKind.CONSUMER
        with instrumentation.span("evaluate", about, parent=parent, kind=kind, ago=waited) as span:
            span.set_attribute("hypha.offered", received.key in offered)
        traces[received.key] = instrumentation.traceparent_of(span)
    return traces
