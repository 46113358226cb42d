"""The running worker: builds its parts, answers schedulers' requests about leases, and ends what has expired.

The decisions are in pure modules (`bidding.arbiter`, `leasing.lease_manager`), bidding itself is in `bidding.bidder`,
tasks are run by `tasks.task_sessions`, and their outputs served by `tasks.output_server`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from hypha_net import instrumentation, rpc, transfer
from hypha_net.connectors.s3_client import S3Client
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_net.log_throttle import LogThrottle
from hypha_proto.ids import PeerId
from hypha_proto.job_logs import LIST_LOGS, READ_LOG
from hypha_proto.leases import (
    LEASE_SWEEP,
    RELEASE_LEASE,
    RENEW_LEASE,
    SAY_GOODBYE,
    WHY_NOT,
    Goodbye,
    LeaseReleased,
    LeaseRenewal,
    Reasons,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import WORKER_REQUESTS, ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_proto.task_resources import PUSH_OUTPUT, RELEASE_OUTPUTS
from hypha_proto.wire_schema import MAX_PRICE
from hypha_proto.worker_status import DESCRIBE_WORKER, MAX_EXECUTORS, DescribeWorker, WorkerStatus
from hypha_worker.accounts.book import AccountBook
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.bidder import Bidder
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.bidding.request_history import RequestHistory, explain_refusal
from hypha_worker.config import WorkerConfig
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.control.commands import DrainCommand, PauseCommands, StatusCommand, load_pause
from hypha_worker.control.server import Command, ControlServer
from hypha_worker.draining import WorkerDrain
from hypha_worker.executor_health import EXCLUSION, ExecutorHealth
from hypha_worker.executors.isolation.assessment import check_required, summarize
from hypha_worker.executors.process.fork_server_client import ForkServer
from hypha_worker.executors.process.process_tree import end_left_processes
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings, find_runtime
from hypha_worker.hardware.devices import find_devices
from hypha_worker.leasing.lease_manager import (
    Lease,
    LeaseEnd,
    LeaseError,
    LeaseManager,
    LeaseState,
    UnknownLeaseError,
)
from hypha_worker.logs.redaction import LogRedaction, secret_values
from hypha_worker.logs.run_log import LogFolder
from hypha_worker.logs.server import LogServer
from hypha_worker.tasks.execution import ExecutionFactory
from hypha_worker.tasks.output_server import OutputServer
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_run import TaskHost, TaskRun
from hypha_worker.tasks.task_sessions import TaskSessions
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
_FAULT_POLL: Final = 0.5
"""Seconds between looks whether an executor can be offered meanwhile."""
_LEASES: Final = instrumentation.Level("hypha.worker.leases.active", "{lease}", "Leases, by state.")
_RENEWALS: Final = instrumentation.Counter(
    "hypha.worker.lease.renewals", "{renewal}", "Renewals that were asked for, by outcome."
)
_OWED: Final = instrumentation.Counter(
    "hypha.worker.lease.owed", "{token}", "Price of the time for which leases were held; orphaned ones cost nothing."
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
            drain = DrainCommand(worker.draining, config.drain_timeout)
            control = ControlServer(config.work_dir, _commands(config, node, worker, drain))
            tasks.start_soon(control.serve)
            cancelled = await _run_until_drained(config, node, worker)
        await drain.report_end(cancelled)
        tasks.cancel_scope.cancel()


def _commands(config: WorkerConfig, node: Node, worker: Worker, drain: DrainCommand) -> Mapping[str, Command]:
    """Return what the owner may ask the running worker for."""
    pause = PauseCommands(config.work_dir, worker.lease_manager, worker.check_executors)
    health = worker.executor_health
    status = StatusCommand(worker.draining, worker.history, node.readiness, health, config.work_dir)
    return {
        "drain": drain.run,
        "pause": pause.pause,
        "resume": pause.resume,
        "status": status.run,
    }


async def _run_until_drained(config: WorkerConfig, node: Node, worker: Worker) -> Sequence[TaskRun]:
    """Become ready, and drain when it is requested; return the tasks that still run at its end."""
    terminated = node.drain_on_sigterm(config.drain_timeout)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_drain_after, terminated, config.drain_timeout, worker.draining)
        async with anyio.create_task_group() as starting:
            starting.start_soon(_become_ready, config, node, worker)
            await worker.draining.requested.wait()
            starting.cancel_scope.cancel()
        node.readiness.waiting("draining")
        cancelled = await worker.draining.run()
        tasks.cancel_scope.cancel()
    return cancelled


async def _become_ready(config: WorkerConfig, node: Node, worker: Worker) -> None:
    await _wait_for_topic_peers(node)
    while (fault := worker.fault) is not None:
        node.readiness.waiting(fault)
        await anyio.sleep(_FAULT_POLL)
    node.readiness.ready()
    await anyio.to_thread.run_sync(_preload, config)


async def _drain_after(event: anyio.Event, timeout: float, draining: WorkerDrain) -> None:
    """Drain when SIGTERM has come, also if a command has begun a longer drain."""
    await event.wait()
    draining.request(timeout, "it was told to end")


async def _wait_for_topic_peers(node: Node) -> None:
    """Wait, for a bounded time, until requests can reach this worker: older gateways do not join the topic."""
    for poll in range(int(TOPIC_TIMEOUT / _TOPIC_POLL)):
        if node.endpoint.topic_peers(WORKER_REQUESTS.name):
            return
        if poll * _TOPIC_POLL >= _TOPIC_GRACE:
            node.readiness.waiting(f"no other peer is on the topic {WORKER_REQUESTS.name} yet")
        await anyio.sleep(_TOPIC_POLL)
    _log.info("no other peer is on the topic %s: requests arrive when one joins it", WORKER_REQUESTS.name)


@asynccontextmanager
async def open_worker(config: WorkerConfig, endpoint: Endpoint) -> AsyncIterator[Worker]:
    """Run a worker on `endpoint` while the context is open.

    Raises:
        OSError: the work directory cannot be used.
        CacheError: the folder of the cache cannot be used.
        IsolationError: a required layer of isolation does not work.
    """
    with ExitStack() as stack:
        settings = await anyio.to_thread.run_sync(_open_work_dir, config, stack)
        settings = replace(settings, fork_server=stack.enter_context(closing(ForkServer())))
        if (cache := config.make_cache()) is not None:
            stack.callback(cache.close)
            await anyio.to_thread.run_sync(cache.open)
        book = AccountBook(config.work_dir)
        await anyio.to_thread.run_sync(book.open)
        stack.callback(book.close)
        async with anyio.create_task_group() as tasks:
            capacity = await anyio.to_thread.run_sync(find_devices, config.capabilities().capacity)
            capabilities = replace(config.capabilities(), capacity=capacity)
            lease_manager = LeaseManager(capacity, config.offer.lease_terms())
            executors = Executors()
            for executor in config.executors:
                executors.add(executor, settings, config.work_dir.absolute())
            lease_manager.on_held = book.add
            lease_manager.is_paused = await anyio.to_thread.run_sync(load_pause, config.work_dir)
            outputs = OutputStore(config.work_dir / f"outputs-{uuid.uuid4()}")
            stack.callback(remove_folder, outputs.folder)
            host = TaskHost(
                endpoint,
                lease_manager,
                config.work_dir,
                outputs,
                executors.factories,
                make_access_policy(config),
                default_storage=config.resources.default.storage,
                cache=cache,
            )
            worker = Worker(
                endpoint,
                Arbiter(config.offer, capabilities, executors.by_descriptor),
                lease_manager,
                TaskSessions(host, tasks),
                OutputServer(endpoint, outputs, lease_manager, tasks),
                executor_health=executors.health,
            )
            await worker.check_executors()
            worker.listen()
            _serve_logs(config, endpoint, settings.logs)
            await tasks.start(Bidder(endpoint, worker.arbiter, lease_manager, worker.sweep, worker.history).run)
            tasks.start_soon(worker.sweep_loop)
            tasks.start_soon(worker.repeat_failed_checks)
            tasks.start_soon(book.run)
            try:
                yield worker
            finally:
                tasks.cancel_scope.cancel()
                with anyio.move_on_after(GOODBYE_TIMEOUT, shield=True):  # while the jobs' processes are ended
                    await worker.say_goodbye("the worker is shutting down")


def _open_work_dir(config: WorkerConfig, stack: ExitStack) -> HostSettings:
    """Take the work directory until `stack` is closed, and end what a killed worker has left running.

    Raises:
        OSError: the work directory cannot be used.
        IsolationError: a required layer of isolation does not work.
    """
    prepare_work_dir(config.work_dir)
    isolation = make_isolation(config)
    clear_work_dir(config.work_dir, stack, partial(_end_left, config.work_dir, isolation))
    sockets = stack.enter_context(open_socket_folder(config.work_dir))
    logs = config.log_folder()
    logs.open()
    has_devices = bool(config.resources.devices) or config.resources.gpu > 0
    return HostSettings(sockets, has_devices, logs, isolation)


def _serve_logs(config: WorkerConfig, endpoint: Endpoint, logs: LogFolder) -> None:
    """Let schedulers read what the executors of their jobs print, without the owner's secrets."""
    secrets = [value for executor in config.executors for value in secret_values(executor.env)]
    server = LogServer(logs, LogRedaction(secrets))
    rpc.serve(endpoint, LIST_LOGS, server.list_logs)
    rpc.serve(endpoint, READ_LOG, server.read_log)


def _preload(config: WorkerConfig) -> None:
    """Import what jobs will need, in a thread once the worker is ready, so that the first job does not wait."""
    for name in sorted({executor.runtime for executor in config.executors}):
        find_runtime(name).preload()


def make_access_policy(config: WorkerConfig) -> AccessPolicy:
    """Return the owner's policy on what jobs may access."""
    connectors = config.connectors
    return AccessPolicy(
        hosts=tuple(connectors.hosts),
        repositories=tuple(connectors.repositories),
        roots=tuple(connectors.roots),
        networks=tuple(ip_network(network) for network in connectors.networks),
        buckets=tuple(connectors.buckets),
        s3=S3Client(connectors.s3_settings),
    )


def make_isolation(config: WorkerConfig) -> IsolationStack:
    """Return the layers that confine processes on this machine, and log them; blocks for some hundred milliseconds.

    Raises:
        IsolationError: a layer that the owner requires does not work.
    """
    from hypha_worker.executors.isolation.stack import make_stack

    stack = make_stack(config.work_dir.absolute(), config.private_paths(), config.isolation.disable)
    check_required(stack.findings, config.isolation.require)
    is_sandboxed, text = summarize(stack.findings)
    _log.log(logging.INFO if is_sandboxed else logging.WARNING, "%s", text)
    return stack


def _end_left(work_dir: Path, isolation: IsolationStack) -> None:
    """End what the runs of a killed worker have left."""
    end_left_processes(work_dir)
    isolation.sweep()


@dataclass(slots=True)
class Executors:
    """The configured executors; where several have a name, the first one runs tasks that ask for the name alone."""

    health: list[ExecutorHealth] = field(default_factory=list)
    """What checks each of them, and counts its failed starts."""
    by_descriptor: dict[ExecutorDescriptor, ExecutorHealth] = field(default_factory=dict)
    """The same, by the descriptors that they are requested by."""
    factories: dict[str, ExecutionFactory] = field(default_factory=dict)
    """What makes an execution of a task, by ``class/name`` and by name alone."""

    def add(self, executor: ExecutorSection, host: HostSettings, work_dir: Path) -> None:
        """Add the next executor of the configuration."""
        runtime = find_runtime(executor.runtime)
        health = ExecutorHealth(executor.offered, find_fault=partial(runtime.find_fault, executor, host, work_dir))
        self.health.append(health)
        for descriptor in executor.descriptors:
            self.by_descriptor.setdefault(descriptor, health)
        factory = self.factories[executor.kind] = runtime.make_factory(executor, replace(host, health=health))
        self.factories.setdefault(executor.name, factory)


@dataclass(slots=True)
class Worker:
    """Answers requests about leases and jobs, and ends leases that have expired."""

    endpoint: Endpoint
    arbiter: Arbiter
    lease_manager: LeaseManager
    tasks: TaskSessions
    outputs: OutputServer
    executor_health: Sequence[ExecutorHealth] = ()
    """Whether each executor can start."""
    history: RequestHistory = field(default_factory=RequestHistory)
    """The latest requests, for the owner."""
    draining: WorkerDrain = field(init=False)
    _refusals: LogThrottle = field(default_factory=LogThrottle)
    _recorded_owed: float = 0.0

    def __post_init__(self) -> None:
        self.draining = WorkerDrain(self.endpoint, self.lease_manager, self.tasks, self.outputs)

    def listen(self) -> None:
        """Register the handlers of schedulers' requests and of peers' pushes."""
        rpc.serve(self.endpoint, RENEW_LEASE, self.renew)
        rpc.serve(self.endpoint, RELEASE_LEASE, self.release)
        rpc.serve(self.endpoint, WHY_NOT, self.explain)
        rpc.serve(self.endpoint, DESCRIBE_WORKER, self.describe)
        rpc.serve(self.endpoint, PUSH_OUTPUT, self.outputs.push_output)
        rpc.serve(self.endpoint, RELEASE_OUTPUTS, self.outputs.release_outputs)
        transfer.serve_pushes(self.endpoint, self.tasks.accept_push)
        transfer.serve_pulls(self.endpoint, self.outputs.resolve_pull)

    async def check_executors(self) -> None:
        """Check all executors; those that can start are offered, also those that have failed at their start."""
        await _check(self.executor_health)

    async def repeat_failed_checks(self) -> None:
        """Check the executors that are not offered again from time to time, until cancelled."""
        while True:
            await anyio.sleep(EXCLUSION)
            await _check([health for health in self.executor_health if health.exclusion is not None])

    @property
    def fault(self) -> str | None:
        """Why none of the executors can be offered; None if one can, or if there are none."""
        found = [(health.executor, health.exclusion) for health in self.executor_health]
        if not found or any(reason is None for _, reason in found):
            return None
        return f"no executor can be offered: {'; '.join(f'{executor}: {reason}' for executor, reason in found)}"

    async def sweep_loop(self) -> None:
        """Sweep leases and outputs regularly, until cancelled."""
        while True:
            await anyio.sleep(LEASE_SWEEP)
            self.sweep(anyio.current_time())
            await self.outputs.remove_expired(anyio.current_time())

    async def say_goodbye(self, reason: str) -> None:
        """Tell each scheduler that its leases here end now, so that it does not try to renew them.

        Schedulers without this protocol are told by the ends of their jobs only.
        """
        async with anyio.create_task_group() as tasks:
            for scheduler, leases in self.lease_manager.held_by_scheduler.items():
                tasks.start_soon(self._say_goodbye_to, scheduler, Goodbye(leases=leases, reason=reason))

    async def _say_goodbye_to(self, scheduler: PeerId, goodbye: Goodbye) -> None:
        try:
            await rpc.call(self.endpoint, scheduler, SAY_GOODBYE, goodbye, timeout=GOODBYE_TIMEOUT)
        except NetError as error:
            _log.info("scheduler %s could not be told of the shutdown: %s", scheduler, error)

    def sweep(self, now: float) -> None:
        """End leases that have expired or are idle, and stop the tasks of the former; keep those that may run on."""
        open_leases = [lease for lease in self.lease_manager.leases if lease.end is None]
        orphans = {lease.id for lease in open_leases if lease.state is LeaseState.ORPHANED}
        self.lease_manager.sweep(now)
        for lease in open_leases:
            if lease.state is LeaseState.ORPHANED and lease.id not in orphans:
                self.tasks.on_orphaned(lease.id)
                _log_orphaned(lease, now)
        ended = [lease for lease in open_leases if lease.end is not None]
        for lease in ended:
            assert lease.end is not None
            self.tasks.end(lease.id, f"the lease is over: {_why_ended(lease)}")
            if lease.end is LeaseEnd.IDLE or lease.id in orphans:
                _log.info("lease %s of scheduler %s ended: %s", lease.id, lease.scheduler, _why_ended(lease))
        if instrumentation.enabled():
            _record_leases(ended, orphans, self.lease_manager.leases)
            owed = self.lease_manager.owed
            _OWED.add(owed - self._recorded_owed)
            self._recorded_owed = owed

    async def renew(self, scheduler: PeerId, message: RenewLease) -> LeaseRenewal:
        """Extend a lease."""
        now = anyio.current_time()
        known = self.lease_manager.find(message.id, scheduler)
        is_orphan = known is not None and known.state is LeaseState.ORPHANED
        try:
            lease = self.lease_manager.renew(message.id, scheduler, now)
        except LeaseError as error:
            self._log_refusal("renewal", scheduler, error)
            is_stranger = isinstance(error, UnknownLeaseError)
            _RENEWALS.add(1, {"hypha.outcome": "stranger" if is_stranger else "refused"})
            return RenewalFailed()
        _RENEWALS.add(1, {"hypha.outcome": "taken-back" if is_orphan else "renewed"})
        if is_orphan:
            _log.info("lease %s: scheduler %s has renewed it again and takes its job back", lease.id, scheduler)
        self.tasks.on_renewed(lease)
        return Renewed(id=lease.id, timeout_ms=int(lease.remaining(now) * 1000))

    async def release(self, scheduler: PeerId, message: ReleaseLease) -> LeaseReleased:
        """End a lease, and stop its task."""
        try:
            lease = self.lease_manager.release(message.id, scheduler)
        except LeaseError as error:
            self._log_refusal("release", scheduler, error)
            if isinstance(error, UnknownLeaseError):
                _ENDS.add(1, {"hypha.outcome": "stranger"})
            return LeaseReleased(known=False)
        _ENDS.add(1, {"hypha.outcome": "released"})
        reason = f"the scheduler released the lease: {message.reason}" if message.reason else "the lease was released"
        self.tasks.end(lease.id, reason)
        return LeaseReleased(known=True)

    def _log_refusal(self, what: str, scheduler: PeerId, error: LeaseError) -> None:
        """Log a refused request, once a minute for each scheduler and kind of error."""
        self._refusals.log(_log, logging.INFO, (what, scheduler, type(error)), "%s refused: %s", what, error)

    async def explain(self, scheduler: PeerId, message: WhyNot) -> Reasons:
        """Return why this worker would make no offer for a request."""
        received = ReceivedRequest(scheduler, message.request, anyio.current_time())
        return Reasons(rejections=explain_refusal(self.arbiter, self.lease_manager, received))

    async def describe(self, scheduler: PeerId, _message: DescribeWorker) -> WorkerStatus:
        """Return what this worker has, and why it would make no offer for a request that asks for nothing."""
        offered = {health.executor for health in self.arbiter.health.values() if health.exclusion is None}
        nothing = WorkerRequest(uuid.UUID(int=0), WorkerSpec(Resources(), ()), MAX_PRICE, 0)
        received = ReceivedRequest(scheduler, nothing, anyio.current_time())
        return WorkerStatus(
            total=self.arbiter.capabilities.capacity.resources,
            free=self.lease_manager.free.resources,
            price=self.arbiter.policy.least_bid,
            executors=tuple(sorted(offered, key=str)[:MAX_EXECUTORS]),
            tasks=len(self.tasks.running),
            rejections=explain_refusal(self.arbiter, self.lease_manager, received),
        )


async def _check(executors: Iterable[ExecutorHealth]) -> None:
    async with anyio.create_task_group() as tasks:
        for health in executors:
            tasks.start_soon(health.check)


def _why_ended(lease: Lease) -> str:
    assert lease.end is not None
    return f"{lease.end.reason}{_grace_text(lease)}"


def _grace_text(lease: Lease) -> str:
    return f", nor in {lease.orphan_grace:g} s more for which its job ran on" if lease.orphan_grace else ""


def _log_orphaned(lease: Lease, now: float) -> None:
    _log.warning(
        "lease %s is orphaned: scheduler %s does not renew it; it is held for %.0f s, not charged",
        lease.id,
        lease.scheduler,
        lease.ends - now,
    )


def _record_leases(ended: Sequence[Lease], orphans: Container[uuid.UUID], after: Sequence[Lease]) -> None:
    """Record how many leases there are, and which ones a sweep ended.

    Args:
        ended: those that the sweep ended.
        orphans: those that were orphaned before it.
        after: all leases after the sweep.
    """
    for state in LeaseState:
        _LEASES.set(sum(lease.state is state for lease in after), {"hypha.lease.state": state.value})
    for lease in ended:
        if lease.end is not None:
            held = "orphaned" if lease.id in orphans else "held"
            state_before = "offered" if lease.state is LeaseState.OFFERED else held
            _ENDS.add(1, {"hypha.outcome": lease.end.value, "hypha.lease.state": state_before})
