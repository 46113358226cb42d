"""Translation of a job's configuration into role requests for the auction and tasks for executors. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.datasets import SAFETENSORS, SLICE_SUFFIXES
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    AggregateConfig,
    All,
    Evaluation,
    Nesterov,
    One,
    PeersReference,
    Preprocessor,
    Reference,
    SchedulerReference,
    SliceAddress,
    TextRows,
    TrainConfig,
)
from hypha_proto.offers import ExecutorDescriptor, WorkerSpec
from hypha_proto.tasks import TaskSpec
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.jobs.artifacts import artifact_dataset, hub_reference
from hypha_scheduler.jobs.config import PriceTable
from hypha_scheduler.jobs.specs import executor_of, model_spec, optimizer_spec, schedule_spec, worker_spec
from hypha_scheduler.strategies.base import DatasetView
from hypha_scheduler.strategies.diloco.config import TRAIN_KIND, DilocoJobConfig
from hypha_scheduler.strategies.diloco.round_effects import RoundSettings
from hypha_scheduler.strategies.diloco.timeouts import Timeouts

TRAIN: Final = "train"
AGGREGATE: Final = "aggregate"
AGGREGATE_KIND: Final = "parameter-server"
WEIGHTS: Final = "weights"
"""Name under which the newest global weights are served."""
MOMENTUM: Final = "momentum"
"""Name under which the outer momentum is served."""
LAST_UPDATE: Final = "outer-update"
"""Name under which the outer update of the last committed round is served."""
SETTLE: Final = 2.0
"""Seconds for which a job waits for more than `min_workers` before it starts."""


def role_requests(job: DilocoJobConfig, *, has_begun: bool = False) -> tuple[RoleRequest, RoleRequest]:
    """Return the job's demand for training workers and for a parameter server; once it `has_begun`, it grows."""
    table = job.resources
    count, least = (table.most_workers, table.least_workers) if has_begun else (table.num_workers, table.first_workers)
    trainer = worker_spec(table.worker, ExecutorDescriptor("train", TRAIN_KIND))
    server = worker_spec(table.parameter_server, ExecutorDescriptor("aggregate", AGGREGATE_KIND))
    return (
        _request(TRAIN, trainer, table.worker_price, count, least),
        _request(AGGREGATE, server, table.parameter_server_price, 1, 1),
    )


def _request(role: str, spec: WorkerSpec, price: PriceTable, count: int, minimum: int) -> RoleRequest:
    return RoleRequest(role, spec, price.bid, price.max, count, minimum, starts_at_minimum=True, settle=SETTLE)


def round_settings(
    job: DilocoJobConfig, workers: int, model_bytes: int = 0, evaluation: Sequence[int | None] = ()
) -> RoundSettings:
    """Return the settings of the job's rounds.

    Args:
        job: the job.
        workers: number of its training workers.
        model_bytes: size of its model.
        evaluation: samples of each slice of its evaluation data, None where unknown.
    """
    table = job.rounds
    return RoundSettings(
        rounds=table.update_rounds,
        target=table.avg_samples_between_updates,
        batch_size=table.batch_for(workers),
        min_members=min(job.resources.least_workers, workers),
        timeout=table.timeout,
        evaluate_every=table.evaluate_every,
        evaluation_samples=_largest_share(evaluation, job.resources.first_workers),
        timeouts=Timeouts(
            model_bytes, table.start_timeout, table.step_timeout, table.merge_timeout, job.resources.most_workers
        ),
    )


def outer_optimizer(job: DilocoJobConfig) -> Nesterov:
    """Return the settings of the job's outer optimizer."""
    table = job.outer_optimizer
    return Nesterov(
        learning_rate=table.learning_rate, momentum=table.momentum, nesterov=None if table.nesterov else False
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one worker in a job."""

    member: int
    """Number of the worker in the job, from 0; never given to another one."""
    share: int | None
    """Which share of the evaluation samples it evaluates, from 0; None if all shares are taken."""


@dataclass(slots=True)
class Slots:
    """Slots of the workers of one job."""

    shares: int
    """Number of shares of the evaluation samples, the job's `num_workers`."""
    next_member: int = 0
    """Lowest member number that was never given away."""
    held: dict[PeerId, Slot] = field(default_factory=dict)
    """A worker that is removed frees its share; its number stays unused."""

    def add(self, peer: PeerId) -> Slot:
        """Give a worker a new member number and the lowest free share; one that has a slot keeps it."""
        return self.held.get(peer) or self.restore(peer, self.next_member)

    def restore(self, peer: PeerId, member: int) -> Slot:
        """Give a worker the member number that it had in an earlier run of the scheduler, and the lowest free share."""
        taken = {slot.share for other, slot in self.held.items() if other != peer}
        share = next((number for number in range(self.shares) if number not in taken), None)
        self.held[peer] = slot = Slot(member, share)
        self.next_member = max(self.next_member, member + 1)
        return slot


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """Job with allocated workers; builds the task of each."""

    job_id: uuid.UUID
    job: DilocoJobConfig
    scheduler: PeerId
    server: PeerId
    workers: tuple[PeerId, ...]
    """Workers that send updates to the parameter server now."""
    model: Reference
    """Source of the start model."""
    preprocessor: Reference | None = None
    """Source of a preprocessor that this scheduler serves."""
    evaluation: Mapping[int, Reference] = field(default_factory=dict)
    """Shares of the evaluation samples, by their numbers."""
    closed: int = 0
    """Last closed round of an earlier run."""
    term: int = 1
    """Term of the parameter server."""
    has_momentum: bool = False
    """Whether there is an outer momentum to begin with."""
    batch: int | None = None
    """Samples per batch; by the configuration if None."""
    scheduled_for: int | None = None
    """Number of workers that the learning-rate schedule is made for; None for that of `workers`.

    It stays the same when workers come and go: all that train in a job follow one schedule."""

    def aggregate_spec(self) -> TaskSpec:
        """Return the parameter server's task: updates come from all workers, results go to them and the scheduler."""
        config = AggregateConfig(
            updates=PeersReference(peers=self.workers, strategy=All()),
            results=PeersReference(peers=(*self.workers, self.scheduler), strategy=All()),
            optimizer=outer_optimizer(self.job),
            term=self.term,
            momentum=self._served(MOMENTUM) if self.has_momentum else None,
        )
        executor = executor_of(self.job.resources.parameter_server, AGGREGATE, AGGREGATE_KIND)
        return TaskSpec(executor=executor, aggregation=config)

    def train_spec(self, slot: Slot, micro_batch: int | None = None) -> TaskSpec:
        """Return a training worker's task; `micro_batch` is as for `train_config`."""
        executor = executor_of(self.job.resources.worker, TRAIN, TRAIN_KIND)
        return TaskSpec(executor=executor, training=self.train_config(slot, micro_batch))

    def train_config(self, slot: Slot | None = None, micro_batch: int | None = None) -> TrainConfig:
        """Return what a training worker does; different workers differ in number and evaluation share.

        Args:
            slot: slot of the worker; None for what all have in common.
            micro_batch: maximum number of samples that its executor computes at once.
        """
        job, workers = self.job, self.scheduled_for or len(self.workers)
        batch_size, samples = self.batch or job.rounds.batch_for(workers), job.rounds.avg_samples_between_updates
        at_once = workers * batch_size  # samples of a step of all workers
        steps = max(1, job.rounds.update_rounds * samples // at_once)
        schedule = schedule_spec(job.inner_optimizer, steps)
        share = None if slot is None or slot.share is None else self.evaluation.get(slot.share)
        return TrainConfig(
            model=model_spec(job.model, self.model),
            data=SchedulerReference(peer=self.scheduler, dataset=job.dataset.name_in(self.job_id)),
            updates=PeersReference(peers=(self.server,), strategy=One()),
            results=PeersReference(peers=(self.server,), strategy=All()),
            optimizer=optimizer_spec(job.inner_optimizer),
            batch_size=batch_size,
            preprocessor=_preprocessor(job, self.preprocessor),
            scheduler=schedule,
            seed=job.seed,
            member=None if slot is None else slot.member,
            round_steps=None if schedule is None else samples / at_once,
            evaluation=None if share is None else Evaluation(data=share, every=job.rounds.evaluate_every),
            first_round=self.closed + 1 if self.closed else None,
            term=self.term,
            weights=self._served(WEIGHTS),
            join=True,
            micro_batch=micro_batch,
            rows=None if job.rows is None else TextRows(**job.rows.model_dump()),
        )

    def _served(self, name: str) -> Reference:
        """Return where a file of the job's newest weights is."""
        resource = SliceAddress(dataset=artifact_dataset(self.job_id, name), index=0)
        return PeersReference(
            peers=(self.scheduler,), strategy=One(), resource=resource, filenames=(f"{name}.safetensors",)
        )


def _preprocessor(job: DilocoJobConfig, artifact: Reference | None) -> Preprocessor | None:
    table = job.preprocessor
    if table is None:
        return None
    if artifact is None:
        artifact = hub_reference(table)
    return Preprocessor(task=job.preprocessor_task, artifact=artifact, input_names=table.input_names)


def evaluation_shares(workers: int, dataset: DatasetView) -> dict[int, Reference]:
    """Divide the slices of a dataset evenly among workers; with fewer slices than workers some shares are empty."""
    shares: dict[int, Reference] = {}
    slices, suffix = len(dataset.samples), SLICE_SUFFIXES[dataset.format or SAFETENSORS]
    for number in range(workers):
        begin, end = number * slices // workers, (number + 1) * slices // workers
        if begin < end:
            shares[number] = PeersReference(
                peers=(dataset.provider,), strategy=One(), resource=SliceAddress(dataset=dataset.name, index=begin),
                filenames=tuple(f"evaluation-{index:05}{suffix}" for index in range(begin, end)),
            )  # fmt: skip
    return shares


def _largest_share(samples: Sequence[int | None], workers: int) -> int | None:
    """Return how many samples the largest share of a dataset has among so many workers; None if that is unknown."""
    known = [count for count in samples if count is not None]
    return None if len(known) < len(samples) else max(known, default=0) * -(-len(known) // workers)
