"""The worker at work: listens for requests, offers, keeps leases, and hands what peers say to `jobs`.

This is the shell around the pure rooms. A request passes `offers` and `leases` here, a dispatch goes on to `jobs`; the
answers to renewals, releases and questions come from the ledger.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread

from hypha_net import gossip, requests, telemetry, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.aggregate import ROUND_MEMBERS
from hypha_proto.ids import PeerId
from hypha_proto.jobs import DISPATCH_JOB
from hypha_proto.leases import (
    CANCEL_JOB,
    LEASE_SWEEP,
    RELEASE_LEASE,
    RENEW_LEASE,
    WHY_NOT,
    CancelJob,
    JobCancelled,
    LeaseReleased,
    LeaseRenewal,
    Reasons,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import OFFER, WORKER_REQUESTS, ExecutorDescriptor, WorkerOffer, WorkerRequest
from hypha_proto.resources import Timestamp
from hypha_worker.config import ExecutorSection, WorkerConfig
from hypha_worker.connectors.access import Access
from hypha_worker.executors.execution import ExecutionFactory, JobContext
from hypha_worker.executors.parameter_server.server import ParameterServer
from hypha_worker.executors.process import ProcessExecution, ProcessSettings
from hypha_worker.jobs import JobManager
from hypha_worker.leases import Lease, LeaseError, LeaseLedger, LeaseState
from hypha_worker.offers import Advertisement, Arbiter, Batch, PlannedOffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypha_net.node.lifecycle import Node

_log = logging.getLogger(__name__)

_JOB_FOLDER: Final = re.compile(r"hypha-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

OFFER_TIMEOUT = 5.0
"""Seconds in which an offer must reach its scheduler."""
TOPIC_PATIENCE = 10.0
"""Seconds that a start waits for somebody on the topic."""
_TOPIC_SOON = 0.5
"""Seconds of them that pass unsaid: a peer says that it is on the topic a moment after it connected."""
_TOPIC_POLL = 0.05
_REQUESTS = telemetry.Counter("hypha.worker.requests", "{request}", "Requests decided, by whether an offer was made.")
_LEASES = telemetry.Level("hypha.worker.leases.active", "{lease}", "Leases, by state.")
_RENEWALS = telemetry.Counter("hypha.worker.lease.renewals", "{renewal}", "Renewals that were asked for, by outcome.")
_ENDS = telemetry.Counter("hypha.worker.lease.ends", "{lease}", "Leases that ended, by how: expired or released.")
SOCKET_FOLDER_LIMIT = 90
"""Bytes of the folder's path that leave room for a socket's name."""


async def serve(config: WorkerConfig, node: Node) -> None:
    """Be a worker until cancelled; ends every job on the way out."""
    async with open_worker(config, node.endpoint):
        await _join_topic(node)
        node.ready()
        await anyio.to_thread.run_sync(_preload, frozenset(executor.runtime for executor in config.executors))
        await anyio.sleep_forever()


async def _join_topic(node: Node) -> None:
    """Wait until requests can reach this worker; not for ever: gateways of the old wire are not in the topic."""
    for poll in range(int(TOPIC_PATIENCE / _TOPIC_POLL)):
        if node.endpoint.topic_peers(WORKER_REQUESTS.name):
            return
        if poll * _TOPIC_POLL >= _TOPIC_SOON:
            node.waiting(f"nobody else is on the topic {WORKER_REQUESTS.name} yet")
        await anyio.sleep(_TOPIC_POLL)
    _log.info("nobody else is on the topic %s: requests come when a peer joins it", WORKER_REQUESTS.name)


@asynccontextmanager
async def open_worker(config: WorkerConfig, endpoint: Endpoint) -> AsyncIterator[Worker]:
    """Serve the worker's conversations on `endpoint` while the context is open.

    Raises:
        OSError: the work directory cannot be used.
    """
    await anyio.to_thread.run_sync(prepare_work_dir, config.work_dir)
    with _socket_folder() as sockets, ExitStack() as held:
        await anyio.to_thread.run_sync(clear_work_dir, config.work_dir, held)
        async with anyio.create_task_group() as tasks:
            capabilities = config.capabilities()
            ledger = LeaseLedger(capabilities.capacity)
            jobs = JobManager(endpoint, ledger, make_factories(config, sockets), config.work_dir, tasks)
            worker = Worker(endpoint, Arbiter(config.offer.policy(), capabilities), ledger, jobs)
            worker.listen()
            await tasks.start(worker.bid)
            tasks.start_soon(worker.keep_time)
            yield worker
            tasks.cancel_scope.cancel()


def _preload(runtimes: Set[str]) -> None:
    """Import what jobs will need, in a thread once the worker is ready, so that the first job does not wait for it."""
    if "process" in runtimes:
        from hypha_worker.bridge.server import preload

        preload()
    if "parameter-server" in runtimes:
        import hypha_worker.executors.parameter_server.outer_step  # noqa: F401


def prepare_work_dir(folder: Path) -> None:
    """Make the work directory if it is missing, and say so if others may look into it.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & ~0o750:
        _log.warning("work_dir %s has mode %04o, wider than 0750: run chmod 750 %s", folder, mode, folder)


def clear_work_dir(folder: Path, held: ExitStack) -> None:
    """Remove what jobs of a worker that was killed have left, unless another worker uses the work directory.

    Until `held` is closed no other worker takes this one's jobs for such.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in [path for path in folder.iterdir() if _JOB_FOLDER.fullmatch(path.name)]:
            _log.warning("removing %s, which a job of a worker that was killed has left", path)
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        _log.info("another worker uses work_dir %s: what killed workers have left there stays", folder)
    except OSError as error:
        _log.warning("work_dir %s cannot be locked: what killed workers have left there stays: %s", folder, error)
        return
    fcntl.flock(descriptor, fcntl.LOCK_SH)


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > SOCKET_FOLDER_LIMIT - len("/hypha-12345678"):
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix="hypha-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def make_factories(config: WorkerConfig, sockets: Path) -> Mapping[ExecutorDescriptor, ExecutionFactory]:
    """What runs the jobs of each configured executor."""
    connectors = config.connectors
    access = Access(tuple(connectors.hosts), tuple(connectors.repositories), tuple(connectors.roots))

    def make(executor: ExecutorSection) -> ExecutionFactory:
        if executor.runtime == "parameter-server":
            return ParameterServer
        settings = ProcessSettings(
            cmd=executor.cmd or "",
            args=tuple(executor.args),
            env=executor.env,
            access=access,
            socket_folder=sockets,
            has_devices=bool(config.resources.devices),
        )

        def run(context: JobContext) -> ProcessExecution:
            return ProcessExecution(context, settings)

        return run

    return {executor.descriptor: make(executor) for executor in config.executors}


@dataclass(slots=True)
class Worker:
    """The conversations of a worker."""

    endpoint: Endpoint
    arbiter: Arbiter
    ledger: LeaseLedger
    jobs: JobManager
    _batch: Batch = field(default_factory=Batch)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def listen(self) -> None:
        """Answer what schedulers ask and take what peers push."""
        requests.serve(self.endpoint, RENEW_LEASE, self.renew)
        requests.serve(self.endpoint, RELEASE_LEASE, self.release)
        requests.serve(self.endpoint, CANCEL_JOB, self.cancel)
        requests.serve(self.endpoint, WHY_NOT, self.explain)
        requests.serve(self.endpoint, DISPATCH_JOB, self.jobs.dispatch)
        requests.serve(self.endpoint, ROUND_MEMBERS, self.jobs.name_members)
        transfer.serve_pushes(self.endpoint, self.jobs.accept_push)

    # --------------------------------------------------------------------------------------------------------- bidding

    async def bid(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen for requests and answer the good ones, batch by batch."""
        async with gossip.subscribe(self.endpoint, WORKER_REQUESTS) as messages, anyio.create_task_group() as tasks:
            tasks.start_soon(self._decide_batches, tasks)
            task_status.started()
            async for scheduler, request in messages:
                self._batch.add(Advertisement(scheduler, request, anyio.current_time()))
                self._changed.set()

    async def _decide_batches(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            while (due := self._batch.due(anyio.current_time())) != 0.0:
                self._changed = anyio.Event()
                with anyio.move_on_after(due):
                    await self._changed.wait()
            now = anyio.current_time()
            self._sweep(now)
            batch = self._batch.take()
            planned = self.arbiter.decide(batch, self.ledger.free, now, self.ledger.bound_requests)
            _log.debug("%d requests, %d offers", len(batch), len(planned))
            traces = _tell_evaluations(batch, planned, now)
            for plan in planned:
                lease = self._hold(plan, now)
                tasks.start_soon(self._send_offer, lease, traces.get(lease.request_id))

    def _hold(self, plan: PlannedOffer, now: float) -> Lease:
        advertisement = plan.advertisement
        return self.ledger.offer(
            uuid.uuid4(), advertisement.scheduler, advertisement.request.id, plan.allocation, plan.price, now
        )

    async def _send_offer(self, lease: Lease, trace: str | None) -> None:
        timeout, timeout_ms = _times(lease.remaining(anyio.current_time()))
        offer = WorkerOffer(
            id=lease.id,
            request_id=lease.request_id,
            price=lease.price,
            resources=lease.allocation.resources,
            timeout=timeout,
            timeout_ms=timeout_ms,
        )
        try:
            with telemetry.span("offer", {"hypha.price": lease.price}, parent=trace):
                await requests.call(self.endpoint, lease.scheduler, OFFER, offer, timeout=OFFER_TIMEOUT)
        except NetError as error:
            self.ledger.withdraw(lease.id)
            _log.warning("offer for request %s did not reach %s: %s", lease.request_id, lease.scheduler, error)

    # ---------------------------------------------------------------------------------------------------------- leases

    async def keep_time(self) -> None:
        """End leases that have run out, and their jobs."""
        while True:
            await anyio.sleep(LEASE_SWEEP / 2)
            self._sweep(anyio.current_time())

    def _sweep(self, now: float) -> None:
        before, over = self.ledger.leases, self.ledger.sweep(now)
        for lease in over:
            self.jobs.cancel(lease.id, lease.scheduler, "the lease was not renewed in time")
        if telemetry.enabled():
            _tell_leases(before, over, self.ledger.leases)

    async def renew(self, scheduler: PeerId, message: RenewLease) -> LeaseRenewal:
        """Hold a lease on."""
        now = anyio.current_time()
        try:
            lease = self.ledger.renew(message.id, scheduler, now)
        except LeaseError as error:
            _log.info("renewal refused: %s", error)
            _RENEWALS.add(1, {"hypha.outcome": "refused"})
            return RenewalFailed()
        _RENEWALS.add(1, {"hypha.outcome": "renewed"})
        timeout, timeout_ms = _times(lease.remaining(now))
        return Renewed(id=lease.id, timeout=timeout, timeout_ms=timeout_ms)

    async def release(self, scheduler: PeerId, message: ReleaseLease) -> LeaseReleased:
        """End a lease; its job is cancelled."""
        try:
            lease = self.ledger.release(message.id, scheduler)
        except LeaseError as error:
            _log.debug("release: %s", error)
            return LeaseReleased(known=False)
        _ENDS.add(1, {"hypha.outcome": "released"})
        reason = f"the scheduler released the lease: {message.reason}" if message.reason else "the lease was released"
        self.jobs.cancel(lease.id, scheduler, reason)
        return LeaseReleased(known=True)

    async def cancel(self, scheduler: PeerId, message: CancelJob) -> JobCancelled:
        """End the job on a lease and keep the lease."""
        return JobCancelled(known=self.jobs.cancel(message.id, scheduler, message.reason))

    async def explain(self, scheduler: PeerId, message: WhyNot) -> Reasons:
        """Say why there would be no offer."""
        request: WorkerRequest = message.request
        return Reasons(reasons=self.arbiter.reasons_against(scheduler, request, self.ledger.free))


def _tell_evaluations(
    batch: Sequence[Advertisement], planned: Sequence[PlannedOffer], now: float
) -> dict[uuid.UUID, str | None]:
    """Record how requests were decided; gives the spans that offers to them are part of."""
    offered = {plan.advertisement.request.id for plan in planned}
    traces: dict[uuid.UUID, str | None] = {}
    for advertisement in batch:
        request = advertisement.request
        _REQUESTS.add(1, {"hypha.offered": request.id in offered})
        about: telemetry.Attributes = {"hypha.peer.id": str(advertisement.scheduler), "hypha.bid": request.bid}
        parent, waited = telemetry.trace_of(request), now - advertisement.received
        with telemetry.span("evaluate", about, parent=parent, kind="consumer", ago=waited) as span:
            span.set({"hypha.offered": request.id in offered})
        traces[request.id] = span.traceparent
    return traces


def _tell_leases(before: Sequence[Lease], over: Sequence[Lease], after: Sequence[Lease]) -> None:
    """Record what is leased, and which leases a sweep ended: those with a job are `over`, the others gone."""
    for state in LeaseState:
        _LEASES.set(sum(lease.state is state for lease in after), {"hypha.lease.state": state.value})
    known = {lease.id for lease in after}
    for lease in before:
        if lease in over or (lease.id not in known and lease.state in (LeaseState.OFFERED, LeaseState.HELD)):
            was = "offered" if lease.state is LeaseState.OFFERED else "held"
            _ENDS.add(1, {"hypha.outcome": "expired", "hypha.lease.state": was})


def _times(remaining: float) -> tuple[Timestamp, int]:
    """A span as old peers read it (a time of our clock) and as ours do (milliseconds from receipt)."""
    return Timestamp.of(time.time() + remaining), int(remaining * 1000)
