"""The running worker: builds its parts, answers schedulers' requests about leases, and ends what has expired.

Called by `cli`. The decisions are in pure modules (`bidding.arbiter`, `leasing.lease_manager`), bidding itself is in
`bidding.bidder`, and dispatched jobs go to `jobs.job_manager`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from hypha_net import instrumentation, rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_net.log_throttle import LogThrottle
from hypha_net.transfer import FilePushTarget
from hypha_proto.dispatch import DISPATCH_JOB
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    CANCEL_JOB,
    LEASE_SWEEP,
    RELEASE_LEASE,
    RENEW_LEASE,
    SAY_GOODBYE,
    WHY_NOT,
    CancelJob,
    Goodbye,
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
from hypha_proto.offers import WORKER_REQUESTS, ExecutorDescriptor
from hypha_proto.task_resources import PUSH_OUTPUT, RELEASE_OUTPUTS
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.bidder import Bidder
from hypha_worker.bidding.rejection import DRAINING
from hypha_worker.config import WorkerConfig
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.control.server import ControlServer
from hypha_worker.draining import Draining, Work
from hypha_worker.executors.isolation.assessment import check_required, summarize
from hypha_worker.executors.process.process_tree import end_left_processes
from hypha_worker.executors.runtimes import HostSettings, Runtime, find_runtime
from hypha_worker.hardware.devices import find_devices
from hypha_worker.jobs.execution import ExecutionFactory, TaskMethod
from hypha_worker.jobs.job_manager import JobManager
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.expiry import expiry_fields
from hypha_worker.leasing.lease_manager import (
    Lease,
    LeaseEnd,
    LeaseError,
    LeaseManager,
    LeaseState,
    UnknownLeaseError,
)
from hypha_worker.leasing.terms import LeaseUsage
from hypha_worker.logs.run_log import LogFolder
from hypha_worker.tasks.execution import TaskExecutionFactory
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_manager import TaskManager
from hypha_worker.tasks.task_run import TaskHost
from hypha_worker.work_dir import clear_work_dir, open_socket_folder, prepare_work_dir, remove_folder

if TYPE_CHECKING:
    from hypha_net.node.lifecycle import Node
    from hypha_worker.executors.isolation.stack import IsolationStack

_log = logging.getLogger(__name__)

TOPIC_TIMEOUT: Final = 10.0
"""Seconds that the start waits for another peer on the topic."""
GOODBYE_TIMEOUT: Final = 1.0
"""Seconds that telling schedulers of the shutdown may take."""
_TOPIC_GRACE: Final = 0.5
"""Seconds of them without a status message: a peer announces its subscription a moment after it connected."""
_TOPIC_POLL: Final = 0.05
_LEASES: Final = instrumentation.Level("hypha.worker.leases.active", "{lease}", "Leases, by state.")
_RENEWALS: Final = instrumentation.Counter(
    "hypha.worker.lease.renewals", "{renewal}", "Renewals that were asked for, by outcome."
)
_ENDS: Final = instrumentation.Counter(
    "hypha.worker.lease.ends",
    "{lease}",
    "Leases that ended, by how: expired, idle, released or stuck; stranger: releases by peers that have no such lease.",
)


async def serve(config: WorkerConfig, node: Node) -> None:
    """Run a worker until it is drained or cancelled; end all jobs on the way out."""
    async with anyio.create_task_group() as tasks:
        async with open_worker(config, node.endpoint) as worker:
            control = ControlServer(config.work_dir, worker.draining, config.drain_timeout)
            tasks.start_soon(control.serve)
            cancelled = await _run_until_drained(config, node, worker)
        await control.report_end(cancelled)
        tasks.cancel_scope.cancel()


async def _run_until_drained(config: WorkerConfig, node: Node, worker: Worker) -> Sequence[Work]:
    """Become ready, and drain when it is requested; return the jobs that still run at its end."""
    terminated = node.drain_on_sigterm(config.drain_timeout)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_drain_after, terminated, config.drain_timeout, worker.draining)
        async with anyio.create_task_group() as starting:
            starting.start_soon(_become_ready, config, node)
            await worker.draining.requested.wait()
            starting.cancel_scope.cancel()
        node.waiting("draining")
        cancelled = await worker.draining.run()
        tasks.cancel_scope.cancel()
    return cancelled


async def _become_ready(config: WorkerConfig, node: Node) -> None:
    await _wait_for_topic_peers(node)
    node.ready()
    await anyio.to_thread.run_sync(_preload, _runtimes(config))


async def _drain_after(event: anyio.Event, timeout: float, draining: Draining) -> None:
    """Drain when SIGTERM has come, also if a command has begun a longer drain."""
    await event.wait()
    draining.request(timeout, "it was told to end")


async def _wait_for_topic_peers(node: Node) -> None:
    """Wait, for a bounded time, until requests can reach this worker: older gateways do not join the topic."""
    for poll in range(int(TOPIC_TIMEOUT / _TOPIC_POLL)):
        if node.endpoint.topic_peers(WORKER_REQUESTS.name):
            return
        if poll * _TOPIC_POLL >= _TOPIC_GRACE:
            node.waiting(f"no other peer is on the topic {WORKER_REQUESTS.name} yet")
        await anyio.sleep(_TOPIC_POLL)
    _log.info("no other peer is on the topic %s: requests arrive when one joins it", WORKER_REQUESTS.name)


@asynccontextmanager
async def open_worker(config: WorkerConfig, endpoint: Endpoint) -> AsyncIterator[Worker]:
    """Run a worker on `endpoint` while the context is open.

    Raises:
        OSError: the work directory cannot be used.
        IsolationError: a required layer of isolation does not work.
    """
    await anyio.to_thread.run_sync(prepare_work_dir, config.work_dir)
    with ExitStack() as stack:
        isolation = await anyio.to_thread.run_sync(make_isolation, config)
        end_processes = partial(_end_left, config.work_dir, isolation)
        await anyio.to_thread.run_sync(clear_work_dir, config.work_dir, stack, end_processes)
        sockets = stack.enter_context(open_socket_folder(config.work_dir))
        logs = config.log_folder()
        await anyio.to_thread.run_sync(logs.open)
        settings = _host_settings(config, sockets, logs, isolation)
        async with anyio.create_task_group() as tasks:
            capabilities = await anyio.to_thread.run_sync(find_capabilities, config)
            lease_manager = LeaseManager(capabilities.capacity, config.offer.lease_terms())
            jobs = JobManager(
                endpoint,
                lease_manager,
                make_factories(config, settings),
                config.work_dir,
                tasks,
                default_storage=config.resources.default.storage,
            )
            outputs = OutputStore(config.work_dir / f"outputs-{uuid.uuid4()}")
            stack.callback(remove_folder, outputs.folder)
            host = TaskHost(
                endpoint,
                lease_manager,
                config.work_dir,
                outputs,
                make_task_factories(config, settings),
                make_access_policy(config),
                default_storage=config.resources.default.storage,
            )
            task_methods = [method for runtime in _runtimes(config) for method in runtime.task_methods]
            worker = Worker(
                endpoint,
                Arbiter(config.offer.policy(), capabilities),
                lease_manager,
                jobs,
                TaskManager(host, tasks),
                tuple(task_methods),
            )
            worker.listen()
            await tasks.start(Bidder(endpoint, worker.arbiter, lease_manager, worker.sweep).run)
            tasks.start_soon(worker.sweep_loop)
            try:
                yield worker
            finally:
                tasks.cancel_scope.cancel()
                with anyio.move_on_after(GOODBYE_TIMEOUT, shield=True):  # while the jobs' processes are ended
                    await worker.say_goodbye("the worker is shutting down")


def _preload(runtimes: Iterable[Runtime]) -> None:
    """Import what jobs will need, in a thread once the worker is ready, so that the first job does not wait."""
    for runtime in runtimes:
        runtime.preload()


def _runtimes(config: WorkerConfig) -> list[Runtime]:
    """Return the runtimes of the configured executors, each once."""
    return [find_runtime(name) for name in sorted({executor.runtime for executor in config.executors})]


def find_capabilities(config: WorkerConfig) -> Capabilities:
    """Return what this worker can offer, with the GPUs that the driver reports. Takes up to a second."""
    capabilities = config.capabilities()
    found = find_devices(config.listed_devices(), config.resources.gpu)
    return replace(capabilities, capacity=Capacity(capabilities.capacity.resources, found.devices, found.largest))


def make_access_policy(config: WorkerConfig) -> AccessPolicy:
    """Return the owner's policy on what jobs may access."""
    connectors = config.connectors
    return AccessPolicy(tuple(connectors.hosts), tuple(connectors.repositories), tuple(connectors.roots))


def make_isolation(config: WorkerConfig) -> IsolationStack:
    """Return the layers that confine processes on this machine, and log them; blocks for some hundred milliseconds.

    Raises:
        IsolationError: a layer that the owner requires does not work.
    """
    from hypha_worker.executors.isolation.stack import make_stack

    work_dir = config.work_dir.absolute()
    private = (work_dir, config.key_pem.absolute())
    stack = make_stack(work_dir, private=private, disabled=config.isolation.disable)
    check_required(stack.findings, config.isolation.require)
    is_sandboxed, text = summarize(stack.findings)
    _log.log(logging.INFO if is_sandboxed else logging.WARNING, "%s", text)
    return stack


def _end_left(work_dir: Path, isolation: IsolationStack) -> None:
    """End what the runs of a killed worker have left."""
    end_left_processes(work_dir)
    isolation.sweep()


def _host_settings(config: WorkerConfig, sockets: Path, logs: LogFolder, stack: IsolationStack) -> HostSettings:
    has_devices = bool(config.resources.devices) or config.resources.gpu > 0
    return HostSettings(make_access_policy(config), sockets, has_devices=has_devices, logs=logs, stack=stack)


def make_task_factories(config: WorkerConfig, host: HostSettings) -> Mapping[str, TaskExecutionFactory]:
    """Return what makes an execution of a task, by ``class/name`` and by name alone; the first of a name counts."""
    made: dict[str, TaskExecutionFactory] = {}
    for executor in config.executors:
        runtime = find_runtime(executor.runtime)
        if runtime.runs_tasks:
            made[executor.kind] = runtime.make_task_factory(executor.settings, host)
            made.setdefault(executor.name, made[executor.kind])
    return made


def make_factories(config: WorkerConfig, host: HostSettings) -> Mapping[ExecutorDescriptor, ExecutionFactory]:
    """Return, for each configured executor, the function that makes an execution of a job."""
    return {
        descriptor: find_runtime(executor.runtime).make_factory(executor.settings, host)
        for executor in config.executors
        if (descriptor := executor.descriptor) is not None
    }


@dataclass(slots=True)
class Worker:
    """Answers requests about leases and jobs, and ends leases that have expired."""

    endpoint: Endpoint
    arbiter: Arbiter
    lease_manager: LeaseManager
    jobs: JobManager
    tasks: TaskManager
    task_methods: tuple[TaskMethod[Any, Any], ...] = ()
    """RPC methods that executions serve."""
    draining: Draining = field(init=False)
    _refusals: LogThrottle = field(default_factory=lambda: LogThrottle(anyio.current_time))

    def __post_init__(self) -> None:
        self.draining = Draining(self.endpoint, self.lease_manager, self.jobs, self.tasks)

    def listen(self) -> None:
        """Register the handlers of schedulers' requests and of peers' pushes."""
        rpc.serve(self.endpoint, RENEW_LEASE, self.renew)
        rpc.serve(self.endpoint, RELEASE_LEASE, self.release)
        rpc.serve(self.endpoint, CANCEL_JOB, self.cancel)
        rpc.serve(self.endpoint, WHY_NOT, self.explain)
        rpc.serve(self.endpoint, DISPATCH_JOB, self.jobs.dispatch)
        for served in self.task_methods:
            rpc.serve(self.endpoint, served.method, self.jobs.message_handler(served))
        rpc.serve(self.endpoint, PUSH_OUTPUT, self.tasks.push_output)
        rpc.serve(self.endpoint, RELEASE_OUTPUTS, self.tasks.release_outputs)
        transfer.serve_pushes(self.endpoint, self._accept_push)
        transfer.serve_pulls(self.endpoint, self.tasks.resolve_pull)

    async def _accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Return where to store a file for a job, or for a task that waits for a delivery."""
        if header is not None and header.delivery is not None:
            return await self.tasks.accept_push(peer, header)
        return await self.jobs.accept_push(peer, header)

    async def sweep_loop(self) -> None:
        """Sweep leases regularly, until cancelled."""
        while True:
            await anyio.sleep(LEASE_SWEEP / 2)
            self.sweep(anyio.current_time())
            await self.tasks.sweep(anyio.current_time())

    async def say_goodbye(self, reason: str) -> None:
        """Tell each scheduler that its leases here end now, so that it does not try to renew them.

        Schedulers without this protocol are told by the ends of their jobs only.
        """
        held: dict[PeerId, list[uuid.UUID]] = {}
        for lease in self.lease_manager.leases:
            if lease.state is LeaseState.HELD:
                held.setdefault(lease.scheduler, []).append(lease.id)
        async with anyio.create_task_group() as tasks:
            for scheduler, leases in held.items():
                tasks.start_soon(self._say_goodbye_to, scheduler, Goodbye(leases=tuple(leases), reason=reason))

    async def _say_goodbye_to(self, scheduler: PeerId, goodbye: Goodbye) -> None:
        try:
            await rpc.call(self.endpoint, scheduler, SAY_GOODBYE, goodbye, timeout=GOODBYE_TIMEOUT)
        except NetError as error:
            _log.info("scheduler %s could not be told of the shutdown: %s", scheduler, error)

    def sweep(self, now: float) -> None:
        """End leases that have expired or are idle, and cancel the jobs of the former."""
        open_leases = [lease for lease in self.lease_manager.leases if lease.end is None]
        for lease in self.lease_manager.sweep(now):
            self.jobs.cancel(lease.id, lease.scheduler, "the lease was not renewed in time")
        ended = [lease for lease in open_leases if lease.end is not None]
        for lease in ended:
            assert lease.end is not None
            self.tasks.end_lease(lease.id, f"the lease is over: {lease.end.reason}")
            if lease.end is LeaseEnd.IDLE:
                _log.info("lease %s of scheduler %s ended: %s", lease.id, lease.scheduler, lease.end.reason)
        if instrumentation.enabled():
            _record_leases(ended, self.lease_manager.leases)

    async def renew(self, scheduler: PeerId, message: RenewLease) -> LeaseRenewal:
        """Extend a lease."""
        now = anyio.current_time()
        try:
            lease = self.lease_manager.renew(message.id, scheduler, now)
        except LeaseError as error:
            self._log_refusal("renewal", scheduler, error)
            is_stranger = isinstance(error, UnknownLeaseError)
            _RENEWALS.add(1, {"hypha.outcome": "stranger" if is_stranger else "refused"})
            return RenewalFailed()
        _RENEWALS.add(1, {"hypha.outcome": "renewed"})
        self.tasks.on_renewed(lease)
        timeout, timeout_ms = expiry_fields(lease.remaining(now))
        return Renewed(id=lease.id, timeout=timeout, timeout_ms=timeout_ms)

    async def release(self, scheduler: PeerId, message: ReleaseLease) -> LeaseReleased:
        """End a lease, and cancel its job."""
        try:
            lease = self.lease_manager.release(message.id, scheduler)
        except LeaseError as error:
            self._log_refusal("release", scheduler, error)
            if isinstance(error, UnknownLeaseError):
                _ENDS.add(1, {"hypha.outcome": "stranger"})
            return LeaseReleased(known=False)
        _ENDS.add(1, {"hypha.outcome": "released"})
        reason = f"the scheduler released the lease: {message.reason}" if message.reason else "the lease was released"
        self.jobs.cancel(lease.id, scheduler, reason)
        self.tasks.end_lease(lease.id, reason)
        return LeaseReleased(known=True)

    def _log_refusal(self, what: str, scheduler: PeerId, error: LeaseError) -> None:
        """Log a refused request, once a minute for each scheduler and kind of error."""
        suppressed = self._refusals.suppressed_count((what, scheduler, type(error)))
        if suppressed is not None:
            more = f" ({suppressed} more since it was last logged)" if suppressed else ""
            _log.info("%s refused: %s%s", what, error, more)

    async def cancel(self, scheduler: PeerId, message: CancelJob) -> JobCancelled:
        """Cancel the job on a lease; the lease stays."""
        known = self.jobs.cancel(message.id, scheduler, message.reason, message.attempt)
        if not known and message.attempt is None:
            known = self.tasks.cancel(message.id, scheduler, message.reason)
        return JobCancelled(known=known)

    async def explain(self, scheduler: PeerId, message: WhyNot) -> Reasons:
        """Return why this worker would make no offer for a request."""
        leases = self.lease_manager
        usage = leases.usage.get(scheduler, LeaseUsage())
        reasons = self.arbiter.rejection_reasons(scheduler, message.request, leases.free, usage)
        if leases.is_closed:
            reasons = (DRAINING, *reasons)
        return Reasons(
            reasons=tuple(reason.text for reason in reasons),
            rejections=tuple(reason.rejection for reason in reasons),
        )


def _record_leases(ended: Sequence[Lease], after: Sequence[Lease]) -> None:
    """Record how many leases there are, and which ones a sweep ended.

    Args:
        ended: those that the sweep ended; spent ones have ended with their job and do not count.
        after: all leases after the sweep.
    """
    for state in LeaseState:
        _LEASES.set(sum(lease.state is state for lease in after), {"hypha.lease.state": state.value})
    for lease in ended:
        if lease.end is not None and lease.state is not LeaseState.SPENT:
            state_before = "offered" if lease.state is LeaseState.OFFERED else "held"
            _ENDS.add(1, {"hypha.outcome": lease.end.value, "hypha.lease.state": state_before})
