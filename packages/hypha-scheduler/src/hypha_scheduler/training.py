"""One DiLoCo job from start to end: the shell that carries out what the pure rooms decide.

Placement, dispatch, the executors' reports, the outer updates, the end. What arrives from peers comes through
`service`, which knows which job it belongs to; everything that takes time runs in this job's own task group.
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
from hypha_scheduler.allocation.auction import AcceptedOffer
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases
from hypha_scheduler.allocation.renewal import keep_leases
from hypha_scheduler.answers import ResponseCache
from hypha_scheduler.datasets.dataset import Dataset, open_dataset
from hypha_scheduler.datasets.providers import Providers
from hypha_scheduler.dispatch import dispatch_ready
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.job_config import JobConfig
from hypha_scheduler.membership import RoundMembership
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.metrics.traffic import Carried, measure_traffic
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
from hypha_scheduler.start_gate import StartGate
from hypha_scheduler.strategies.diloco.operator import START_MODEL, DilocoOperator, diloco_tasks
from hypha_scheduler.strategies.diloco.rounds import Effect, Fail, Late, Measured, RoundClosed, Rounds
from hypha_scheduler.strategies.diloco.slices import LedgerFullError, SliceLedger
from hypha_scheduler.submit import AGGREGATE, TRAIN, PlacedJob, evaluation_shares, round_settings, wants
from hypha_scheduler.summary import summarise
from hypha_scheduler.tasks import Task, TaskGraph, TaskState

_log = logging.getLogger(__name__)

_GOODBYE: Final = 30.0
"""Seconds for executors to end once they were told that the job is done."""
_LAST_UPDATE: Final = 30.0
"""Seconds that this scheduler waits for an outer update which all workers have."""
_ABANDON: Final = 3.0
"""Seconds for giving leases back when a job is given up."""
_LAST_WORDS: Final = 2.0
"""Seconds for a worker that says that its executor ended, to say how."""
_TICK: Final = 0.5


@dataclass(slots=True)
class _Running:
    """What exists once the workers are found."""

    graph: TaskGraph
    operator: DilocoOperator
    placed: PlacedJob
    members: RoundMembership


class TrainingRun:
    """One job. `run` conducts it; the ``on_…`` methods take what peers say about it."""

    def __init__(
        self,
        endpoint: Endpoint,
        job: JobConfig,
        runs: Path,
        bridge: StatusBridge | None = None,
        job_id: uuid.UUID | None = None,
    ) -> None:
        """Give the job a directory in `runs`, and an id unless it has one; nothing happens before `run`."""
        self.job_id = job_id or uuid.uuid4()
        self.directory = runs / str(self.job_id)
        self._endpoint = endpoint
        self._job = job
        self._bridge = bridge
        self._leases = HeldLeases()
        self._result = ResultModel(self.directory / "model", job.rounds.checkpoint_every)
        self._gate = StartGate(0)
        self._placement: Allocator | None = None
        self._running: _Running | None = None
        self._dataset: Dataset | None = None
        self._providers: Providers | None = None
        self._model: StartModel | None = None
        self._preprocessor: StartModel | None = None
        self._evaluation: Dataset | None = None
        self._answered: ResponseCache[ProgressResponse] = ResponseCache()
        self._assigned: ResponseCache[SliceAssigned] = ResponseCache()
        self._failure: str | None = None
        self._over = anyio.Event()
        self._ended = False
        self._changed = anyio.Event()
        self._tasks: anyio.abc.TaskGroup
        self._report: JobReport

    # ------------------------------------------------------------------------------------------------ from start to end

    async def run(self) -> Path:
        """Conduct the job; returns the path of its ``result.json``.

        Raises:
            JobFailedError: it came to no result; its executors are stopped and its leases given back.
        """
        why = ""
        try:
            return await self._run()
        except* OSError as errors:  # also of the job's background tasks: they end this job, not the scheduler
            why = "; ".join(map(str, leaf_errors(errors)))
        raise JobFailedError(f"{self.directory}: the job's files cannot be used: {why}")

    async def _run(self) -> Path:
        self.directory.mkdir(parents=True)
        (self.directory / "updates").mkdir()
        with JobReport(self.directory, self._bridge) as self._report:
            self._report.accepted(self.job_id, self._job.model_dump(mode="json"))
            try:
                return await self._conduct()
            except JobFailedError as error:
                self._report.failed(str(error))
                raise
            except BaseException as error:
                interrupted = isinstance(error, anyio.get_cancelled_exc_class())
                self._report.failed("the scheduler was told to end" if interrupted else f"internal error: {error!r}")
                raise

    async def _conduct(self) -> Path:
        failure: JobFailedError | None = None
        result = self.directory / "result.json"
        async with anyio.create_task_group() as self._tasks:
            try:
                await self._train(result)
            except JobFailedError as error:
                failure = error
            finally:
                with anyio.move_on_after(_ABANDON, shield=True):
                    await self._release_all("the job is over")
                self._ended = True
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
        bids, placement_seconds = await self._place()
        running = self._running = self._prepare(bids, self._dataset, self._model)
        before: dict[PeerId, Carried] = {}
        peers = [task.peer for task in running.graph.tasks]
        self._tasks.start_soon(measure_traffic, self._endpoint, peers, before)
        self._tasks.start_soon(self._watch_time)
        running.graph.provide(START_MODEL)
        await dispatch_ready(self._endpoint, running.graph, self._spec_of, self._not_dispatched)
        self._report.tell("dispatched", seconds=round(anyio.current_time() - began, 3))
        await self._over.wait()
        if self._failure is not None:
            raise JobFailedError(self._failure)
        await self._end(running)
        after: dict[PeerId, Carried] = {}
        await measure_traffic(self._endpoint, peers, after)
        await self._release_all("the job is done")
        summary = {
            "job_id": str(self.job_id),
            **summarise(running.operator, running.placed.workers, before, after),
            "model_dir": str(self._result.directory),
            "placement_seconds": round(placement_seconds, 4),
            "wall_seconds": round(anyio.current_time() - began, 3),
        }
        write_result(result, summary)
        self._report.finished(summary)

    async def _place(self) -> tuple[tuple[AcceptedOffer, ...], float]:
        resources = self._job.resources
        placement = self._placement = Allocator(
            self._endpoint, wants(self._job), self._leases,
            least={TRAIN: resources.least_workers, AGGREGATE: 1}, timeout=resources.allocation_timeout,
        )  # fmt: skip
        self._tasks.start_soon(keep_leases, self._endpoint, self._leases, self._lease_lost)
        bids = await placement.find()
        self._report.placed(bids, placement.seconds)
        return bids, placement.seconds

    def _prepare(self, bids: tuple[AcceptedOffer, ...], dataset: Dataset, model: StartModel) -> _Running:
        trains = sorted(((bid.peer, bid.lease) for bid in bids if bid.role == TRAIN), key=lambda pair: pair[0])
        [server] = [(bid.peer, bid.lease) for bid in bids if bid.role == AGGREGATE]
        peers = tuple(peer for peer, _ in trains)
        settings = round_settings(self._job, len(trains))
        self._gate = StartGate(len(trains), anyio.current_time())
        rounds = Rounds(settings, peers, anyio.current_time())
        return _Running(
            graph=TaskGraph(diloco_tasks(server, trains)),
            operator=DilocoOperator(
                rounds, SliceLedger(dataset.samples, self._job.seed, settings.batch_size), server[0]
            ),
            placed=self._placed(server[0], peers, model),
            members=RoundMembership(self._endpoint, self.job_id, server[0], settings.timeout),
        )

    def _placed(self, server: PeerId, peers: tuple[PeerId, ...], model: StartModel) -> PlacedJob:
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

    async def _watch_time(self) -> None:
        """Let deadlines pass."""
        assert self._running is not None
        operator = self._running.operator
        while not operator.rounds.over:
            self._carry_out(operator.expire(anyio.current_time()))
            await anyio.sleep(_TICK)
        with anyio.move_on_after(_LAST_UPDATE):
            await self._over.wait()
        self.fail(f"the outer update of round {self._result.round + 1} did not come from the parameter server")

    async def _end(self, running: _Running) -> None:
        """Wait until every executor has left, and close the books."""
        with anyio.move_on_after(_GOODBYE):
            while not running.graph.over:
                self._changed = anyio.Event()
                await self._changed.wait()
        for task in running.graph.running():
            _log.warning("task %s at %s did not say that it ended within %g s", task.name, task.peer, _GOODBYE)
            self._report.tell("warning", text=f"task {task.name} at {task.peer} did not end in time")
        await self._result.finish()
        self._carry_out(running.operator.finish())

    async def _release_all(self, reason: str) -> None:
        async with anyio.create_task_group() as tasks:
            for held in self._leases.held():
                self._leases.drop(held.lease)
                tasks.start_soon(release, self._endpoint, held.peer, held.lease, reason)

    # -------------------------------------------------------------------------------------------------- what goes wrong

    def fail(self, reason: str) -> None:
        """The job cannot go on; the first reason counts."""
        if self._failure is None and not self._over.is_set():
            self._failure = reason
            self._over.set()

    def _not_dispatched(self, task: Task, why: str) -> None:
        self._leases.drop(task.lease)
        self._tasks.start_soon(release, self._endpoint, task.peer, task.lease, "its task did not start")
        self._task_lost(task, why)

    def _lease_lost(self, held: HeldLease, why: str) -> None:
        if self._running is None:
            if self._placement is not None:
                self._placement.lost(held.lease)
            return
        task = self._running.graph.of_lease(held.lease)
        if task is not None:
            self._task_lost(task, why)

    def _task_lost(self, task: Task, why: str) -> None:
        assert self._running is not None
        if not self._running.graph.end(task.name, TaskState.FAILED) or self._over.is_set():
            return
        self._changed.set()
        if task.role == AGGREGATE:
            self.fail(f"the parameter server {task.peer} was lost: {why}")
        else:
            self._worker_lost(task.peer, why)

    def _worker_lost(self, peer: PeerId, why: str) -> None:
        assert self._running is not None
        self._report.tell("worker_lost", worker=str(peer), reason=why)
        self._carry_out(self._running.operator.lost(peer, why, anyio.current_time()))
        self._check_over()

    # --------------------------------------------------------------------------------------------------- what peers say

    def concerns(self, peer: PeerId) -> bool:
        """Whether `peer` works on this job."""
        return self._running is not None and any(task.peer == peer for task in self._running.graph.tasks)

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """A worker offers itself."""
        if self._placement is not None and self._running is None:
            self._placement.offered(peer, offer)

    async def on_data(self, peer: PeerId, request: DataRequest) -> SliceAssigned | NotFound | WireError:
        """A worker asks for a slice."""
        if self._running is None or self._dataset is None or request.dataset != self._dataset.name:
            return NotFound()
        if peer not in self._running.operator.rounds.members:
            return NotFound()
        assert self._providers is not None
        await self._gate.passed(peer)
        if (before := self._assigned.given(peer, request.id)) is not None:
            return before
        try:
            given = self._running.operator.slice_for(peer, anyio.current_time())
        except LedgerFullError as error:
            return WireError(message=str(error))
        if given is None:
            return NotFound()
        digest = self._dataset.digest(given.index)
        first, *others = self._providers.order(given.index)
        assigned = SliceAssigned(
            data_provider=first, index=given.index, epoch=given.epoch, digest=digest, others=tuple(others) or None
        )
        return self._assigned.note(peer, request.id, assigned)

    def on_report(self, peer: PeerId, request: ProgressRequest) -> ProgressResponse:
        """An executor reports."""
        if self._running is None or not self._speaks_for(peer, request.lease):
            return ProgressError()
        if (before := self._answered.given(peer, request.id)) is not None:
            return before
        answer, effects = self._running.operator.report(peer, request.progress, anyio.current_time())
        if isinstance(answer, ProgressError):
            _log.warning("report %s of %s does not fit", type(request.progress).__name__, peer)
        with self._own_files():
            self._carry_out(effects)
        self._check_over()
        return self._answered.note(peer, request.id, answer)

    @contextmanager
    def _own_files(self) -> Iterator[None]:
        """While a peer is answered: that this job cannot write its files fails the job and not the answer."""
        try:
            yield
        except OSError as error:
            self.fail(f"{self.directory}: the job's files cannot be used: {error}")

    def _speaks_for(self, peer: PeerId, lease: uuid.UUID | None) -> bool:
        assert self._running is not None
        tasks = [task for task in self._running.graph.tasks if task.peer == peer]
        return bool(tasks) and (lease is None or lease in {task.lease for task in tasks})

    def on_refused(self, peer: PeerId, refused: UpdateRefused) -> None:
        """The parameter server could not use a member's update."""
        if self._running is not None and peer == self._running.placed.server:
            number, member, why = refused.round, refused.peer, refused.reason
            with self._own_files():
                self._report.tell("update_refused", round=number, worker=str(member), reason=why)
                self._carry_out(self._running.operator.refused(number, member, why, anyio.current_time()))

    def on_pull(self, request: PullRequest) -> PullSource | Refusal:
        """A worker fetches the start model, or the preprocessor."""
        wanted = self._model if request.dataset == model_dataset(self.job_id) else None
        if request.dataset == preprocessor_dataset(self.job_id):
            wanted = self._preprocessor
        return Refusal(reason="there is no such model") if wanted is None else wanted.resolve(request)

    def on_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """The parameter server sends an outer update."""
        if self._running is None or peer != self._running.placed.server:
            return Refusal(reason="only the job's parameter server sends here")
        if header is not None and header.kind != OUTER_UPDATE:
            return Refusal(reason=f"a scheduler takes {OUTER_UPDATE}, not {header.kind[:40]}")
        expected = self._result.round + 1
        number = expected if header is None else header.round
        if number < expected:
            return Refusal(reason=f"the outer update of round {number} is here already")
        if number > expected:
            self.fail(f"the outer update of round {expected} never came: the parameter server sends that of {number}")
            return Refusal(reason=f"the outer update of round {expected} is missing")
        path = self.directory / "updates" / f"round-{number}-{uuid.uuid4().hex[:8]}.safetensors"

        async def arrived(_size: int, _digest: str) -> None:
            try:
                await self._result.take(path, number)
            except JobFailedError as error:
                self.fail(str(error))
            self._check_over()

        return FilePushTarget(path, self._result.largest_update(), arrived, slot=str(self.directory))

    def on_job_end(self, peer: PeerId, end: JobEnd) -> None:
        """A worker tells how an executor ended, its processes gone."""
        task = self._running.graph.of_lease(end.lease) if self._running is not None else None
        if self._running is None or task is None or task.peer != peer:
            return
        state = {"finished": TaskState.FINISHED, "cancelled": TaskState.CANCELLED}.get(end.outcome, TaskState.FAILED)
        first = self._running.graph.end(task.name, state)
        self._changed.set()
        if not first or (end.outcome == "cancelled" and self._over.is_set()):
            return  # known, or as we asked
        with self._own_files():
            self._report.note("ended", task=task.name, outcome=end.outcome, exit_code=end.exit_code)
        code = "" if end.exit_code is None else f", exit code {end.exit_code}"
        lines = "".join(f"\n  | {line[:500]}" for line in end.last_lines[-40:])
        reason = end.reason[:1000] or "it left before the job was done"
        if end.outcome == "cancelled" and task.role == TRAIN:
            with self._own_files():
                self._worker_lost(peer, f"its executor was cancelled: {reason}")
        elif end.outcome != "finished" or peer not in self._running.operator.dismissed:
            self._ended_badly(task, f"executor {end.outcome}{code}: {reason}{lines}")

    def on_job_status(self, peer: PeerId, status: JobStatus) -> None:
        """A worker tells how an executor stands; ours say more with `JobEnd`, old ones have only this."""
        running = self._running
        task = running.graph.of_lease(status.task_id) if running is not None else None
        if running is None or task is None or task.peer != peer:
            return
        if isinstance(status.status, Finished | Failed):
            finished = isinstance(status.status, Finished)
            self._begin(partial(self._await_last_words, running, task, finished))

    async def _await_last_words(self, running: _Running, task: Task, finished: bool) -> None:
        well = finished and task.peer in running.operator.dismissed
        if not well:
            await anyio.sleep(_LAST_WORDS)
        if running.graph.end(task.name, TaskState.FINISHED if finished else TaskState.FAILED) and not well:
            self._ended_badly(task, "executor ended before the job was done; the worker's log says why")
        self._changed.set()

    def _ended_badly(self, task: Task, what: str) -> None:
        text = f"task {task.name} on worker {task.peer}: {what}"
        server = self._running.placed.server if self._running is not None else task.peer
        if server != task.peer and str(server) in what:
            text += f"\n({server} is the job's parameter server)"
        if self._over.is_set():
            _log.warning("%s", text)
            self._report.tell("warning", text=text)
        self.fail(text)

    # ----------------------------------------------------------------------------------------------- what is to be done

    def _carry_out(self, effects: tuple[Effect, ...]) -> None:
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
                self._begin(partial(self._running.members.tell, effect, self._running.operator.rounds, self.fail))

    def _begin(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something for a peer that spoke; nothing any more in the moment in which the job ends."""
        if not self._ended:
            self._tasks.start_soon(task)

    def _check_over(self) -> None:
        assert self._running is not None
        if self._running.operator.rounds.over and self._result.round >= self._job.rounds.update_rounds:
            self._over.set()
