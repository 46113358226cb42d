"""One DiLoCo job from start to end: the I/O around the pure modules that make the decisions.

Runs allocation, dispatch, the handling of reports and outer updates, and the end of the job. `service` creates one
`TrainingRun` per job and passes it the messages of peers; background work runs in the job's own task group.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net.endpoint import Endpoint
from hypha_net.error_causes import leaf_errors
from hypha_net.transfer import FilePushTarget, PullSource
from hypha_proto.datasets import DataRequest, SliceAssigned
from hypha_proto.dispatch import Failed, Finished, JobStatus, NotFound, WireError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec, Reference
from hypha_proto.leases import JobEnd
from hypha_proto.offers import WorkerOffer
from hypha_proto.progress import ProgressError, ProgressRequest, ProgressResponse
from hypha_proto.round_membership import UpdateRefused
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_scheduler.allocation.allocator import Allocator, release
from hypha_scheduler.allocation.auction import AcceptedOffer, AuctionSettings
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.answers import ResponseCache
from hypha_scheduler.datasets.dataset import Dataset, open_dataset
from hypha_scheduler.datasets.providers import Providers
from hypha_scheduler.dispatch import dispatch_ready
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.job_config import JobConfig
from hypha_scheduler.membership import RoundAnnouncer
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.metrics.traffic import TrafficCounts, measure_traffic
from hypha_scheduler.reporting import JobReport
from hypha_scheduler.results import (
    ResultModel,
    StartModel,
    model_dataset,
    open_preprocessor,
    open_start_model,
    preprocessor_dataset,
    write_result,
)
from hypha_scheduler.start_gate import StartBarrier
from hypha_scheduler.strategies.diloco.operator import START_MODEL, DilocoOperator, diloco_tasks
from hypha_scheduler.strategies.diloco.rounds import Effect, Fail, Late, Measured, RoundClosed, Rounds
from hypha_scheduler.strategies.diloco.slices import LedgerFullError, SliceLedger
from hypha_scheduler.submit import AGGREGATE, TRAIN, PlacedJob, evaluation_shares, role_requests, round_settings
from hypha_scheduler.summary import summarize
from hypha_scheduler.tasks import Task, TaskGraph, TaskState

_log = logging.getLogger(__name__)

_EXECUTOR_EXIT_TIMEOUT: Final = 30.0
"""Seconds for executors to exit after they were sent `Done`."""
_LAST_UPDATE_TIMEOUT: Final = 30.0
"""Seconds to wait for the last outer update after all workers have merged it."""
_RELEASE_TIMEOUT: Final = 3.0
"""Seconds to release leases when a job ends."""
_JOB_END_GRACE: Final = 2.0
"""Seconds to wait for a `JobEnd` with details after a `JobStatus` reported the end of an executor."""
_DEADLINE_CHECK_INTERVAL: Final = 0.5
_DEFAULT_AUCTION: Final = AuctionSettings()


@dataclass(slots=True)
class _Running:
    """State of a job whose workers are allocated."""

    graph: TaskGraph
    operator: DilocoOperator
    placed: PlacedJob
    announcer: RoundAnnouncer


class TrainingRun:
    """One job: `run` runs it to its end, the ``on_…`` methods handle messages of peers about it."""

    def __init__(
        self,
        endpoint: Endpoint,
        job: JobConfig,
        runs: Path,
        bridge: StatusBridge | None = None,
        job_id: uuid.UUID | None = None,
        auction: AuctionSettings = _DEFAULT_AUCTION,
    ) -> None:
        """Create a job with a directory in `runs`, under a new id unless one is given; nothing runs before `run`."""
        self.job_id = job_id or uuid.uuid4()
        self.directory = runs / str(self.job_id)
        self._endpoint = endpoint
        self._job = job
        self._bridge = bridge
        self._auction_settings = auction
        self._leases = HeldLeases()
        self._result = ResultModel(self.directory / "model", job.rounds.checkpoint_every)
        self._start_barrier = StartBarrier(0)
        self._allocator: Allocator | None = None
        self._running: _Running | None = None
        self._dataset: Dataset | None = None
        self._providers: Providers | None = None
        self._model: StartModel | None = None
        self._preprocessor: StartModel | None = None
        self._evaluation: Dataset | None = None
        self._progress_responses: ResponseCache[ProgressResponse] = ResponseCache()
        self._slice_responses: ResponseCache[SliceAssigned] = ResponseCache()
        self._failure: str | None = None
        self._outcome_known = anyio.Event()
        self._closed = False
        self._changed = anyio.Event()
        self._tasks: anyio.abc.TaskGroup
        self._report: JobReport

    # ------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> Path:
        """Run the job to its end and return the path of its ``result.json``.

        Raises:
            JobFailedError: the job failed; its executors are stopped and its leases released.
        """
        why = ""
        try:
            return await self._run_reported()
        except* OSError as errors:  # includes background tasks of the job: they fail this job, not the scheduler
            why = "; ".join(map(str, leaf_errors(errors)))
        raise JobFailedError(f"{self.directory}: the job's files cannot be used: {why}")

    async def _run_reported(self) -> Path:
        self.directory.mkdir(parents=True)
        (self.directory / "updates").mkdir()
        with JobReport(self.directory, self._bridge) as self._report:
            self._report.accepted(self.job_id, self._job.model_dump(mode="json"))
            try:
                return await self._run_and_release()
            except JobFailedError as error:
                self._report.failed(str(error))
                raise
            except BaseException as error:
                interrupted = isinstance(error, anyio.get_cancelled_exc_class())
                self._report.failed("the scheduler was stopped" if interrupted else f"internal error: {error!r}")
                raise

    async def _run_and_release(self) -> Path:
        failure: JobFailedError | None = None
        result = self.directory / "result.json"
        async with anyio.create_task_group() as self._tasks:
            try:
                await self._train(result)
            except JobFailedError as error:
                failure = error
            finally:
                with anyio.move_on_after(_RELEASE_TIMEOUT, shield=True):
                    await self._release_all("the job is over")
                self._closed = True
            self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    async def _train(self, result: Path) -> None:
        began = anyio.current_time()
        timeout = self._job.resources.allocation_timeout
        name = self._job.dataset.dataset
        self._dataset = await open_dataset(self._endpoint, name, self.directory / "manifest.json", timeout=timeout)
        self._providers = Providers(self._endpoint, name, self._dataset.pinned, self._dataset.provider)
        self._tasks.start_soon(self._providers.watch)
        self._model = await open_start_model(
            self._job.model, self._result.directory, self.job_id, self._endpoint.peer_id
        )
        self._preprocessor = await open_preprocessor(
            self._job.preprocessor, self.directory / "preprocessor", self.job_id, self._endpoint.peer_id
        )
        if self._job.dataset.evaluation is not None:
            manifest = self.directory / "evaluation-manifest.json"
            self._evaluation = await open_dataset(
                self._endpoint, self._job.dataset.evaluation, manifest, timeout=timeout
            )
        offers, placement_seconds = await self._allocate_workers()
        running = self._running = self._prepare(offers, self._dataset, self._model)
        before: dict[PeerId, TrafficCounts] = {}
        peers = [task.peer for task in running.graph.tasks]
        self._tasks.start_soon(measure_traffic, self._endpoint, peers, before)
        self._tasks.start_soon(self._watch_deadlines)
        running.graph.provide(START_MODEL)
        await dispatch_ready(self._endpoint, running.graph, self._spec_of, self._not_dispatched)
        self._report.emit("dispatched", seconds=round(anyio.current_time() - began, 3))
        await self._outcome_known.wait()
        if self._failure is not None:
            raise JobFailedError(self._failure)
        await self._wait_for_executors(running)
        after: dict[PeerId, TrafficCounts] = {}
        await measure_traffic(self._endpoint, peers, after)
        await self._release_all("the job is done")
        summary = {
            "job_id": str(self.job_id),
            **summarize(running.operator, running.placed.workers, before, after),
            "model_dir": str(self._result.directory),
            "placement_seconds": round(placement_seconds, 4),
            "wall_seconds": round(anyio.current_time() - began, 3),
        }
        write_result(result, summary)
        self._report.finished(summary)

    async def _allocate_workers(self) -> tuple[tuple[AcceptedOffer, ...], float]:
        resources = self._job.resources
        allocator = self._allocator = Allocator(
            self._endpoint, role_requests(self._job), self._leases,
            minimum={TRAIN: resources.least_workers, AGGREGATE: 1}, timeout=resources.allocation_timeout,
            tasks=self._tasks, settings=self._auction_settings, on_shortage=self._report_shortage,
        )  # fmt: skip
        self._tasks.start_soon(renew_leases, self._endpoint, self._leases, self._lease_lost)
        offers = await allocator.allocate()
        self._report.placed(offers, allocator.seconds)
        return offers, allocator.seconds

    def _report_shortage(self, shortage: Shortage) -> None:
        self._report.emit(
            "shortage",
            role=shortage.role,
            suitable=shortage.suitable,
            known=shortage.known,
            rejections=dict(shortage.counts),
            text=str(shortage),
        )

    def _prepare(self, offers: tuple[AcceptedOffer, ...], dataset: Dataset, model: StartModel) -> _Running:
        trains = sorted(
            ((offer.peer, offer.lease) for offer in offers if offer.role == TRAIN), key=lambda pair: pair[0]
        )
        [server] = [(offer.peer, offer.lease) for offer in offers if offer.role == AGGREGATE]
        peers = tuple(peer for peer, _ in trains)
        settings = round_settings(self._job, len(trains))
        self._start_barrier = StartBarrier(len(trains), anyio.current_time())
        rounds = Rounds(settings, peers, anyio.current_time())
        return _Running(
            graph=TaskGraph(diloco_tasks(server, trains)),
            operator=DilocoOperator(
                rounds, SliceLedger(dataset.samples, self._job.seed, settings.batch_size), server[0]
            ),
            placed=self._placed_job(server[0], peers, model),
            announcer=RoundAnnouncer(self._endpoint, self.job_id, server[0], settings.timeout),
        )

    def _placed_job(self, server: PeerId, peers: tuple[PeerId, ...], model: StartModel) -> PlacedJob:
        preprocessor = self._preprocessor.reference if self._preprocessor is not None else None
        shares: dict[PeerId, Reference] = {}
        if (found := self._evaluation) is not None:
            shares = evaluation_shares(peers, [found.provider], found.name, len(found.slices))
        scheduler = self._endpoint.peer_id
        return PlacedJob(self.job_id, self._job, scheduler, server, peers, model.reference, preprocessor, shares)

    def _spec_of(self, task: Task) -> JobSpec:
        assert self._running is not None
        placed = self._running.placed
        return placed.aggregate_spec() if task.role == AGGREGATE else placed.train_spec(task.peer)

    async def _watch_deadlines(self) -> None:
        """Check deadlines periodically; fail the job if the last outer update is not received in time."""
        assert self._running is not None
        operator = self._running.operator
        while not operator.rounds.over:
            self._apply(operator.expire(anyio.current_time()))
            await anyio.sleep(_DEADLINE_CHECK_INTERVAL)
        with anyio.move_on_after(_LAST_UPDATE_TIMEOUT):
            await self._outcome_known.wait()
        self.fail(f"the outer update of round {self._result.round + 1} did not come from the parameter server")

    async def _wait_for_executors(self, running: _Running) -> None:
        """Wait until every executor has exited, then complete the model and report the remaining rounds."""
        with anyio.move_on_after(_EXECUTOR_EXIT_TIMEOUT):
            while not running.graph.over:
                self._changed = anyio.Event()
                await self._changed.wait()
        for task in running.graph.running():
            _log.warning(
                "task %s at %s did not report its end within %g s", task.name, task.peer, _EXECUTOR_EXIT_TIMEOUT
            )
            self._report.emit("warning", text=f"task {task.name} at {task.peer} did not end in time")
        await self._result.finish()
        self._apply(running.operator.finish())

    async def _release_all(self, reason: str) -> None:
        async with anyio.create_task_group() as tasks:
            for held in self._leases.held():
                self._leases.drop(held.lease)
                tasks.start_soon(release, self._endpoint, held.peer, held.lease, reason)
            for offer in self._allocator.auction.unanswered if self._allocator is not None else ():
                tasks.start_soon(release, self._endpoint, offer.peer, offer.lease, reason)

    # -------------------------------------------------------------------------------------------------------- failures

    def fail(self, reason: str) -> None:
        """Fail the job; only the first reason counts."""
        if self._failure is None and not self._outcome_known.is_set():
            self._failure = reason
            self._outcome_known.set()

    def _not_dispatched(self, task: Task, why: str) -> None:
        self._leases.drop(task.lease)
        self._tasks.start_soon(release, self._endpoint, task.peer, task.lease, "its task did not start")
        self._task_lost(task, why)

    def _lease_lost(self, held: HeldLease, why: str) -> None:
        if self._running is None:
            if self._allocator is not None:
                self._allocator.lease_lost(held.lease)
            return
        task = self._running.graph.of_lease(held.lease)
        if task is not None:
            self._task_lost(task, why)

    def _task_lost(self, task: Task, why: str) -> None:
        assert self._running is not None
        if not self._running.graph.end(task.name, TaskState.FAILED) or self._outcome_known.is_set():
            return
        self._changed.set()
        if task.role == AGGREGATE:
            self.fail(f"the parameter server {task.peer} was lost: {why}")
        else:
            self._worker_lost(task.peer, why)

    def _worker_lost(self, peer: PeerId, why: str) -> None:
        assert self._running is not None
        self._report.emit("worker_lost", worker=str(peer), reason=why)
        self._apply(self._running.operator.worker_lost(peer, why, anyio.current_time()))
        self._check_finished()

    # ----------------------------------------------------------------------------------------------- messages of peers

    def involves(self, peer: PeerId) -> bool:
        """Return whether a task of this job runs on `peer`."""
        return self._running is not None and any(task.peer == peer for task in self._running.graph.tasks)

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Handle an offer of a worker; after the search the allocator releases it."""
        if self._allocator is not None and not self._closed:
            self._allocator.add_offer(peer, offer)

    async def on_data(self, peer: PeerId, request: DataRequest) -> SliceAssigned | NotFound | WireError:
        """Handle a worker's request for a slice."""
        if self._running is None or self._dataset is None or request.dataset != self._dataset.name:
            return NotFound()
        if peer not in self._running.operator.rounds.members:
            return NotFound()
        assert self._providers is not None
        await self._start_barrier.wait(peer)
        if (earlier := self._slice_responses.get(peer, request.id)) is not None:
            return earlier
        try:
            assignment = self._running.operator.slice_for(peer, anyio.current_time())
        except LedgerFullError as error:
            return WireError(message=str(error))
        if assignment is None:
            return NotFound()
        index = assignment.index
        first, *others = self._providers.order(index)
        digest = self._dataset.digest(index)
        response = SliceAssigned(
            data_provider=first, index=index, epoch=assignment.epoch, digest=digest, others=tuple(others) or None
        )
        return self._slice_responses.put(peer, request.id, response)

    def on_report(self, peer: PeerId, request: ProgressRequest) -> ProgressResponse:
        """Handle a progress report of an executor."""
        if self._running is None or not self._runs_task(peer, request.lease):
            return ProgressError()
        if (earlier := self._progress_responses.get(peer, request.id)) is not None:
            return earlier
        answer, effects = self._running.operator.report(peer, request.progress, anyio.current_time())
        if isinstance(answer, ProgressError):
            _log.warning("report %s of %s does not match the state of the job", type(request.progress).__name__, peer)
        with self._failing_on_file_errors():
            self._apply(effects)
        self._check_finished()
        return self._progress_responses.put(peer, request.id, answer)

    @contextmanager
    def _failing_on_file_errors(self) -> Iterator[None]:
        """Turn an error of the job's own files into a failure of the job instead of the request being handled."""
        try:
            yield
        except OSError as error:
            self.fail(f"{self.directory}: the job's files cannot be used: {error}")

    def _runs_task(self, peer: PeerId, lease: uuid.UUID | None) -> bool:
        assert self._running is not None
        tasks = [task for task in self._running.graph.tasks if task.peer == peer]
        return bool(tasks) and (lease is None or lease in {task.lease for task in tasks})

    def on_refused(self, peer: PeerId, refused: UpdateRefused) -> None:
        """Handle the parameter server's refusal of a member's update."""
        if self._running is not None and peer == self._running.placed.server:
            number, member, why = refused.round, refused.peer, refused.reason
            with self._failing_on_file_errors():
                self._report.emit("update_refused", round=number, worker=str(member), reason=why)
                self._apply(self._running.operator.update_refused(number, member, why, anyio.current_time()))

    def on_pull(self, request: PullRequest) -> PullSource | Refusal:
        """Handle a worker's pull of a file of the start model or the preprocessor."""
        wanted = self._model if request.dataset == model_dataset(self.job_id) else None
        if request.dataset == preprocessor_dataset(self.job_id):
            wanted = self._preprocessor
        return Refusal(reason="there is no such model") if wanted is None else wanted.resolve(request)

    def on_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Handle the push of an outer update by the parameter server."""
        if self._running is None or peer != self._running.placed.server:
            return Refusal(reason="only the job's parameter server may push to its scheduler")
        if header is not None and header.kind != OUTER_UPDATE:
            return Refusal(reason=f"a scheduler accepts {OUTER_UPDATE}, not {header.kind[:40]}")
        expected = self._result.round + 1
        number = expected if header is None else header.round
        if number < expected:
            return Refusal(reason=f"the outer update of round {number} was already received")
        if number > expected:
            self.fail(f"the outer update of round {expected} never came: the parameter server sends that of {number}")
            return Refusal(reason=f"the outer update of round {expected} is missing")
        path = self.directory / "updates" / f"round-{number}-{uuid.uuid4().hex[:8]}.safetensors"

        async def on_complete(_size: int, _digest: str) -> None:
            try:
                await self._result.apply_update(path, number)
            except JobFailedError as error:
                self.fail(str(error))
            self._check_finished()

        return FilePushTarget(path, self._result.largest_update(), on_complete, slot=str(self.directory))

    def on_job_end(self, peer: PeerId, end: JobEnd) -> None:
        """Handle a worker's report on how an executor ended."""
        task = self._running.graph.of_lease(end.lease) if self._running is not None else None
        if self._running is None or task is None or task.peer != peer:
            return
        state = {"finished": TaskState.FINISHED, "cancelled": TaskState.CANCELLED}.get(end.outcome, TaskState.FAILED)
        first = self._running.graph.end(task.name, state)
        self._changed.set()
        if not first or (end.outcome == "cancelled" and self._outcome_known.is_set()):
            return  # already known, or requested by this scheduler
        with self._failing_on_file_errors():
            self._report.persist_async("ended", task=task.name, outcome=end.outcome, exit_code=end.exit_code)
        code = "" if end.exit_code is None else f", exit code {end.exit_code}"
        lines = "".join(f"\n  | {line[:500]}" for line in end.last_lines[-40:])
        reason = end.reason[:1000] or "it exited before the job was done"
        if end.outcome == "cancelled" and task.role == TRAIN:
            with self._failing_on_file_errors():
                self._worker_lost(peer, f"its executor was cancelled: {reason}")
        elif end.outcome != "finished" or peer not in self._running.operator.told_done:
            self._task_failed(task, f"executor {end.outcome}{code}: {reason}{lines}")

    def on_job_status(self, peer: PeerId, status: JobStatus) -> None:
        """Handle a worker's status report; older workers send only this, newer ones also `JobEnd` with details."""
        running = self._running
        task = running.graph.of_lease(status.task_id) if running is not None else None
        if running is None or task is None or task.peer != peer:
            return
        if isinstance(status.status, Finished | Failed):
            finished = isinstance(status.status, Finished)
            self._start_background(partial(self._wait_for_job_end, running, task, finished))

    async def _wait_for_job_end(self, running: _Running, task: Task, finished: bool) -> None:
        well = finished and task.peer in running.operator.told_done
        if not well:
            await anyio.sleep(_JOB_END_GRACE)
        if running.graph.end(task.name, TaskState.FINISHED if finished else TaskState.FAILED) and not well:
            self._task_failed(task, "executor ended before the job was done; the worker's log says why")
        self._changed.set()

    def _task_failed(self, task: Task, what: str) -> None:
        text = f"task {task.name} on worker {task.peer}: {what}"
        server = self._running.placed.server if self._running is not None else task.peer
        if server != task.peer and str(server) in what:
            text += f"\n({server} is the job's parameter server)"
        if self._outcome_known.is_set():
            _log.warning("%s", text)
            self._report.emit("warning", text=text)
        self.fail(text)

    # --------------------------------------------------------------------------------------------------------- effects

    def _apply(self, effects: tuple[Effect, ...]) -> None:
        assert self._running is not None
        for effect in effects:
            if isinstance(effect, Fail):
                self.fail(effect.reason)
            elif isinstance(effect, RoundClosed):
                self._report.round_closed(effect, self._result.update_bytes)
            elif isinstance(effect, Measured):
                self._report.measured(effect)
            elif isinstance(effect, Late):
                self._report.late(effect)
            else:
                self._start_background(
                    partial(self._running.announcer.announce, effect, self._running.operator.rounds, self.fail)
                )

    def _start_background(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a background task on behalf of a request, unless the job has ended."""
        if not self._closed:
            self._tasks.start_soon(task)

    def _check_finished(self) -> None:
        assert self._running is not None
        if self._running.operator.rounds.over and self._result.round >= self._job.rounds.update_rounds:
            self._outcome_known.set()
