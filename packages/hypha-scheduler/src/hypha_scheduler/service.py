"""Scheduler service: runs the configured or submitted jobs and routes messages of peers to the job they belong to.

Started by `cli`. Creates one `jobs.runner.JobRunner` per job.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from hypha_net import instrumentation, rpc, transfer
from hypha_net.errors import RequestTimeoutError, StreamResetError
from hypha_net.log_throttle import LogThrottle
from hypha_net.node.lifecycle import Node
from hypha_proto.datasets import DATA, DataRequest, NotFound, SlicesAnswer, WireError
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain, DrainReceived
from hypha_proto.ids import PeerId
from hypha_proto.leases import SAY_GOODBYE, Goodbye, GoodbyeReceived
from hypha_proto.offers import OFFER, OfferReceived, WorkerOffer
from hypha_proto.task_resources import LOCATE_RESOURCE, Gone, LocateResource, ResourceLocation
from hypha_proto.training_reports import REPORT, ReportAnswer, ReportError, ReportTraining
from hypha_proto.transfer import PullRequest, PushHeader, Refusal
from hypha_scheduler.config import SchedulerConfig
from hypha_scheduler.errors import JobFailedError, JobInterruptedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.context import JobHost
from hypha_scheduler.jobs.runner import JobRunner
from hypha_scheduler.jobs.source_download import source_access
from hypha_scheduler.jobs.task_streams import TaskStreams, serve_task_streams
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import StrategyMethod, not_served
from hypha_scheduler.strategies.registry import load_strategy
from hypha_scheduler.submission.active_jobs import ActiveJob, ActiveJobs
from hypha_scheduler.submission.node_directory import NodeDirectory
from hypha_scheduler.submission.queue_files import remove_queued
from hypha_scheduler.submission.resumption import ResumableJob, find_jobs_to_take_up
from hypha_scheduler.submission.server import SubmissionServer

_log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")

_LAST_METRICS: Final = 2.0
"""Seconds to wait for the last metrics to reach the bridge after all jobs have ended."""
_LAST_ENDS: Final = 2.0
"""Seconds to wait until the ends of jobs are recorded."""
_STOP_TIMEOUT: Final = 10.0
"""Seconds after SIGTERM to record that jobs were interrupted and to release leases on which nothing runs."""
_MAX_HOLD: Final = 25.0
"""Seconds for which a message waits while jobs are taken up; after that its sender tries again."""
_TAKING_TIMEOUT: Final = 2.0
"""Seconds to wait for the answer to a renewal whose lease's stream is here already."""
_TAKING_INTERVAL: Final = 0.02
_ACTIVE: Final = instrumentation.UpDownCounter("hypha.scheduler.jobs.active", "{job}", "Running jobs.")
_ENDED: Final = instrumentation.Counter("hypha.scheduler.jobs.ended", "{job}", "Jobs that have ended, by outcome.")
_OFFERS: Final = instrumentation.Counter("hypha.scheduler.offers", "{offer}", "Offers received from workers.")


async def serve(config: SchedulerConfig, node: Node) -> None:
    """Run the configured jobs one after the other, and beside them those that are submitted.

    Returns when the configured and all submitted jobs have ended; without configured ones, runs until cancelled.

    Raises:
        JobFailedError: a local file that a job names is missing, then none was run; or at least one job failed, the
            others were still run.
    """
    if lacking := [line for job in config.jobs for line in job.missing_files()]:
        raise JobFailedError("\n".join(lacking))
    service = _open_service(config, node)
    nodes = NodeDirectory(node.endpoint)
    submissions = SubmissionServer(
        config.runs_dir, service.run_job, service.resume_job, config.scheduler.strategies, service.jobs, nodes
    )
    node.tasks.start_soon(nodes.watch)
    failures: list[JobFailedError] = []
    async with _stopped_by_sigterm(node, service, submissions), anyio.create_task_group() as tasks:
        taken_up = await service.take_up(config.runs_dir, config.jobs)
        node.readiness.ready()
        tasks.start_soon(_accept_jobs, submissions, not config.jobs)
        async with anyio.create_task_group() as running:
            for found in taken_up:
                is_configured = any(found.job is job for job in config.jobs)
                ended = failures if is_configured else None
                running.start_soon(_run_unattended, partial(service.run_taken_up, found), ended)
            for job in _not_begun(config.jobs, taken_up):
                if not service.is_stopping:
                    await _run_unattended(partial(service.run_configured, job), failures)
        if config.jobs:
            submissions.stop_when_idle()
    await _write_the_last(service.host)
    if failures:
        raise JobFailedError("\n".join(f"job failed: {error}" for error in failures))


async def serve_resumed(config: SchedulerConfig, node: Node, found: ResumableJob) -> None:
    """Continue one interrupted job, without the configured ones.

    Raises:
        JobFailedError: it failed, or its strategy does not resume it.
    """
    service = _open_service(config, node)
    node.readiness.ready()
    failures: list[JobFailedError] = []
    async with _stopped_by_sigterm(node, service):
        await _run_unattended(partial(service.resume_job, found.job, found.job_id), failures)
    await _write_the_last(service.host)
    for failure in failures:
        raise failure


def _not_begun(configured: Sequence[JobTable], taken_up: Sequence[ResumableJob]) -> Sequence[JobTable]:
    """Return the configured jobs after the last of those that are taken up: they run in their order."""
    begun = {id(found.job) for found in taken_up}
    return configured[max((place for place, job in enumerate(configured, 1) if id(job) in begun), default=0) :]


async def _run_unattended(run_job: Callable[[], Awaitable[Path]], failures: list[JobFailedError] | None) -> None:
    """Run a job that no client waits for; add its failure to `failures`, or log it if there are none."""
    try:
        _log.info("job done: %s", await run_job())
    except JobFailedError as error:
        if failures is None:
            _log.error("job failed: %s", error)
        else:
            failures.append(error)
    except JobInterruptedError as error:
        _log.warning("job interrupted: %s", error)


async def _write_the_last(host: JobHost) -> None:
    """Wait for a moment until metrics and ends of jobs are written."""
    if host.bridge is not None:
        await host.bridge.drain(_LAST_METRICS)
    await host.ends.drain(_LAST_ENDS)


@asynccontextmanager
async def _stopped_by_sigterm(
    node: Node, service: SchedulerService, submissions: SubmissionServer | None = None
) -> AsyncIterator[None]:
    """Interrupt all jobs at the first SIGTERM, and take none any more."""

    async def stop() -> None:
        await stopped.wait()
        service.interrupt_jobs()
        if submissions is not None:
            submissions.stop_when_idle()

    stopped = node.drain_on_sigterm(_STOP_TIMEOUT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        yield
        tasks.cancel_scope.cancel()


def _open_service(config: SchedulerConfig, node: Node) -> SchedulerService:
    """Return the service; its status bridge, if one is configured, runs in the background."""
    table, bridge = config.scheduler, None
    if config.bridge_address is not None:
        bridge = StatusBridge(config.bridge_address)
        node.tasks.start_soon(bridge.run)
    access = source_access(table.connectors.networks, table.connectors.s3_settings)
    host = JobHost(node.endpoint, config.runs_dir, bridge, table.auction, table.model_command, access)
    node.tasks.start_soon(host.ends.run)
    return SchedulerService(host, table.strategies, ActiveJobs(table.queue.max_running, table.queue.max_waiting))


async def _accept_jobs(submissions: SubmissionServer, required: bool) -> None:
    """Accept submitted jobs; configured ones run also where none can be submitted.

    Raises:
        OSError: the socket cannot be created, and there is nothing else to do.
    """
    try:
        await submissions.serve()
    except OSError as error:
        if required:
            raise
        _log.warning("no jobs can be submitted beside the configured ones: %s", error)


def _mark_placed(job: ActiveJob) -> None:
    """Note that a job has its first workers: from now on it is resumed after an interruption, and not begun again."""
    job.is_placed = True
    remove_queued(job.directory)


class SchedulerService:
    """Jobs of one scheduler, and the request handlers that route messages to them."""

    def __init__(
        self, host: JobHost, strategies: Collection[str] | None = None, jobs: ActiveJobs | None = None
    ) -> None:
        """Register the request handlers on the host's endpoint.

        Only `strategies` are loaded, or any that is installed. `jobs` are those that clients can follow and cancel.
        """
        self.host = host
        self._strategies = strategies
        self._runs: dict[uuid.UUID, JobRunner] = {}
        self._refusals = LogThrottle()
        self.jobs = ActiveJobs() if jobs is None else jobs
        """Jobs that wait or run, to which those that it runs for others belong."""
        self._served: set[str] = set()
        """Names of the RPC methods of strategies that are served."""
        self.is_stopping = False
        """Whether no further job is run."""
        self._knows_jobs = anyio.Event()
        """Not set while jobs to take up are looked for: until it is, no peer is told that its job is unknown."""
        self._knows_jobs.set()
        endpoint = host.endpoint
        rpc.serve(endpoint, OFFER, self._unless_stopping(self._offer))
        rpc.serve(endpoint, DATA, self._unless_stopping(self._data))
        rpc.serve(endpoint, REPORT, self._unless_stopping(self._report))
        rpc.serve(endpoint, SAY_GOODBYE, self._unless_stopping(self._goodbye))
        rpc.serve(endpoint, ANNOUNCE_DRAIN, self._unless_stopping(self._drain))
        rpc.serve(endpoint, LOCATE_RESOURCE, self._unless_stopping(self._locate))
        serve_task_streams(endpoint, self._find_streams)
        transfer.serve_pulls(endpoint, self._unless_stopping(self._pull))
        transfer.serve_pushes(endpoint, self._unless_stopping(self._push))

    async def run_job(self, job: JobTable, job_id: uuid.UUID | None = None) -> Path:
        """Run a job, under a new id unless one is given; return the path of its ``result.json``.

        Raises:
            JobFailedError: the job failed.
        """
        return await self._run(self._add_job(job, job_id or uuid.uuid4()))

    async def resume_job(self, job: JobTable, job_id: uuid.UUID) -> Path:
        """Continue an interrupted job from its journal; see `run_job`.

        Raises:
            JobFailedError: the job failed, or cannot be resumed.
        """
        return await self._run(self._add_job(job, job_id, resume=True))

    async def run_configured(self, job: JobTable) -> Path:
        """Run a job of the configuration; see `run_job`. Clients can follow and cancel it."""
        job_id = uuid.uuid4()
        active = self.jobs.add(ActiveJob(job_id, job, self.host.runs / str(job_id)))
        return await self.jobs.run(active, partial(self.run_job, job, job_id))

    def _add_job(self, job: JobTable, job_id: uuid.UUID, *, resume: bool = False, take_up: bool = False) -> JobRunner:
        """Return the runner of a job, which gets the messages about it from now on.

        Raises:
            JobFailedError: the job runs already, or no job can run any more.
        """
        if self.is_stopping:
            raise JobFailedError("the scheduler is being stopped")
        if job_id in self._runs:
            raise JobFailedError(f"job {job_id} runs already")
        strategy = load_strategy(job.type, self._strategies)
        self._serve_methods(strategy.rpc_methods)
        active = self.jobs.get(job_id)
        on_placed = partial(_mark_placed, active) if active is not None and active.waits else None
        run = JobRunner(self.host, strategy, job, job_id, resume, take_up, on_placed)
        self._runs[job_id] = run
        if active is not None:
            active.runner = run
        return run

    async def _run(self, run: JobRunner) -> Path:
        about = {"hypha.job.id": str(run.job_id), **run.job.span_attributes()}
        outcome = "failed"
        _ACTIVE.add(1)
        try:
            with instrumentation.span("job", about):
                result = await run.run()
            outcome = "finished"
            return result
        except JobInterruptedError:
            outcome = "interrupted"
            raise
        finally:
            del self._runs[run.job_id]
            _ACTIVE.add(-1)
            _ENDED.add(1, {"hypha.outcome": outcome})

    async def take_up(self, runs: Path, configured: Sequence[JobTable]) -> list[ResumableJob]:
        """Return the unfinished jobs in a directory whose tasks may still run; `run_taken_up` continues them.

        What their workers say waits until then.
        """
        self._knows_jobs = anyio.Event()
        try:
            find = partial(find_jobs_to_take_up, runs, configured, self._strategies, time.time())
            found = await anyio.to_thread.run_sync(find, abandon_on_cancel=True)
            for job in found:
                self._add_job(job.job, job.job_id, take_up=True)
        finally:
            self._knows_jobs.set()
        return found

    async def run_taken_up(self, found: ResumableJob) -> Path:
        """Continue a job that `take_up` has found.

        Raises:
            JobFailedError: it failed, or its strategy does not continue it.
            JobInterruptedError: the scheduler is stopped.
        """
        runner = self._runs[found.job_id]
        active = self.jobs.add(
            ActiveJob(found.job_id, found.job, found.directory, submitted_at=found.submitted_at, runner=runner)
        )
        return await self.jobs.run(active, partial(self._run, runner))

    def interrupt_jobs(self) -> None:
        """End the runs of all jobs, for which `JobInterruptedError` is raised; run no further ones."""
        self.is_stopping = True
        self.jobs.stop()
        for run in self._runs.values():
            run.interrupt()

    def _unless_stopping(
        self, handler: Callable[[PeerId, Req], Awaitable[Resp]]
    ) -> Callable[[PeerId, Req], Awaitable[Resp]]:
        """Return a handler that gives no answer once jobs are interrupted: the answer would say that they are over.

        Tasks that run on then ask the next scheduler.
        """

        async def handle(peer: PeerId, request: Req) -> Resp:
            answer = await handler(peer, request)
            if self.is_stopping:
                raise StreamResetError("the scheduler is being stopped")
            return answer

        return handle

    async def _find_job(self, job_id: uuid.UUID) -> JobRunner | None:
        """Return a job, once its tasks are known: a worker would end a task that is said to be unknown."""
        return next(iter(await self._known_jobs(job_id)), None)

    async def _known_jobs(self, job_id: uuid.UUID | None = None) -> Sequence[JobRunner]:
        """Return all jobs, or the one of an id, once their tasks are known.

        Raises:
            RequestTimeoutError: that takes too long; the peer asks again.
        """
        with anyio.move_on_after(_MAX_HOLD):
            if not self._knows_jobs.is_set():
                await self._knows_jobs.wait()
            found = [run for run in self._runs.values() if job_id in (None, run.job_id)]
            for run in found:
                if not run.begun.is_set():
                    await run.begun.wait()
            return [run for run in found if run.job_id in self._runs]
        raise RequestTimeoutError(f"jobs were not taken up within {_MAX_HOLD:g} s")

    def _serve_methods(self, methods: Sequence[StrategyMethod]) -> None:
        for method in methods:
            if method.method.name not in self._served:
                self._served.add(method.method.name)
                rpc.serve(self.host.endpoint, method.method, self._unless_stopping(partial(self._message, method)))

    async def _message(self, method: StrategyMethod, peer: PeerId, message: Any) -> Any:
        run = await self._find_job(message.attempt.job_id)
        return method.unknown_job if run is None else await run.on_message(peer, method, message)

    async def _offer(self, peer: PeerId, offer: WorkerOffer) -> OfferReceived:
        _OFFERS.add()
        for run in self._runs.values():
            run.on_offer(peer, offer)
        return OfferReceived()

    async def _data(self, peer: PeerId, request: DataRequest) -> SlicesAnswer:
        run = await self._find_job(request.attempt.job_id)
        answer = NotFound() if run is None else await run.on_slice_request(peer, request)
        # to a member of the job it says that there are no more slices
        is_over = isinstance(answer, NotFound) and run is not None and run.attempts.runs_on(peer)
        if isinstance(answer, NotFound | WireError) and not is_over:
            reason = (
                answer.message if isinstance(answer, WireError) else "it is not a member of a job with this dataset"
            )
            self._log_refusal("slice request", peer, run, reason)
        return answer

    async def _report(self, peer: PeerId, request: ReportTraining) -> ReportAnswer:
        run = await self._find_job(request.attempt.job_id)
        unknown = ReportError(
            reason=f"this scheduler runs no job {request.attempt.job_id}: it has ended, or began before a restart"
        )
        answer = unknown if run is None else await run.on_training_report(peer, request)
        if isinstance(answer, ReportError):
            what = f"report {type(request.progress).__name__}"
            self._log_refusal(what, peer, run, answer.reason or "it does not match the state of the job")
        return answer

    def _log_refusal(self, what: str, peer: PeerId, run: JobRunner | None, reason: str) -> None:
        """Log a refused request, once a minute for each peer, kind of request and, within a job, reason."""
        about = (None, None) if run is None else (run.job_id, reason)
        of_job = "" if run is None else f" for job {run.job_id}"
        text = "%s of %s%s refused: %s"
        self._refusals.log(_log, logging.WARNING, (what, peer, *about), text, what, peer, of_job, reason)

    async def _goodbye(self, peer: PeerId, goodbye: Goodbye) -> GoodbyeReceived:
        for run in await self._known_jobs():
            run.on_goodbye(peer, goodbye)
        return GoodbyeReceived()

    async def _drain(self, peer: PeerId, drain: Drain) -> DrainReceived:
        for run in await self._known_jobs():
            run.on_drain(peer, drain)
        return DrainReceived()

    async def _find_streams(self, peer: PeerId, lease: uuid.UUID) -> TaskStreams | None:
        """Return the streams of the job that holds a lease.

        Its worker may open the stream before the answer that confirms the lease is handled here.
        """
        until = anyio.current_time() + _TAKING_TIMEOUT
        while (run := next((run for run in self._runs.values() if run.holds(lease, peer)), None)) is None:
            if anyio.current_time() >= until or not any(run.is_taking(lease, peer) for run in self._runs.values()):
                return None
            await anyio.sleep(_TAKING_INTERVAL)
        return run.task_streams

    async def _locate(self, peer: PeerId, request: LocateResource) -> ResourceLocation:
        run = await self._find_job(request.attempt.job_id)
        if run is None:
            return ResourceLocation(gone=Gone(reason=f"this scheduler runs no job {request.attempt.job_id}"))
        return await run.on_locate(peer, request)

    async def _pull(self, peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        for run in await self._known_jobs():
            if request.dataset.startswith(f"{run.job_id}/") and run.attempts.involves(peer):
                return run.on_pull_request(peer, request)
        return not_served(request)

    async def _push(self, peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        run = await self._find_job(header.attempt.job_id)
        if run is None:
            return Refusal(reason="this scheduler runs no such job")
        return await run.on_push_request(peer, header)
