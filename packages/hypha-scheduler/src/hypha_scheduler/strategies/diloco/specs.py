"""Translation of a job's configuration into role requests for the auction and job specs for executors. Pure.

Called by `operator`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    AggregateConfig,
    AggregateJob,
    All,
    Evaluation,
    JobSpec,
    Nesterov,
    One,
    PeersReference,
    Preprocessor,
    Reference,
    SchedulerReference,
    SliceAddress,
    TrainConfig,
    TrainJob,
)
from hypha_proto.offers import AggregateExecutor, TrainExecutor
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.jobs.artifacts import hub_reference
from hypha_scheduler.jobs.specs import descriptor_of, model_spec, optimizer_spec, schedule_spec, worker_spec
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.rounds import RoundSettings

TRAIN: Final = "train"
AGGREGATE: Final = "aggregate"
TRAIN_KIND: Final = "diloco-transformer"
AGGREGATE_KIND: Final = "parameter-server"
_EVALUATION: Final = 86400.0
"""Timeout in seconds for evaluating the model after a round; a lost worker is noticed earlier by its lease."""


def role_requests(job: DilocoJobConfig) -> tuple[RoleRequest, RoleRequest]:
    """Return the job's demand for training workers and for a parameter server."""
    resources = job.resources
    return (
        RoleRequest(
            TRAIN,
            worker_spec(resources.worker, TrainExecutor(TRAIN_KIND)),
            bid=resources.worker_price.bid,
            max_price=resources.worker_price.max,
            count=resources.num_workers,
            minimum=resources.least_workers,
        ),
        RoleRequest(
            AGGREGATE,
            worker_spec(resources.parameter_server, AggregateExecutor(AGGREGATE_KIND)),
            bid=resources.parameter_server_price.bid,
            max_price=resources.parameter_server_price.max,
            count=1,
            minimum=1,
        ),
    )


def round_settings(job: DilocoJobConfig, workers: int) -> RoundSettings:
    """Return the settings of the job's rounds with `workers` training workers."""
    return RoundSettings(
        rounds=job.rounds.update_rounds,
        target=job.rounds.avg_samples_between_updates,
        batch_size=job.rounds.batch_for(workers),
        min_members=min(job.resources.least_workers, workers),
        timeout=job.rounds.timeout,
        evaluation=_EVALUATION if job.rounds.evaluate_every else 0.0,
    )


def outer_optimizer(job: DilocoJobConfig) -> Nesterov:
    """Return the settings of the job's outer optimizer."""
    table = job.outer_optimizer
    return Nesterov(
        learning_rate=table.learning_rate, momentum=table.momentum, nesterov=None if table.nesterov else False
    )


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """Job with allocated workers; builds the job spec of each."""

    job_id: uuid.UUID
    job: DilocoJobConfig
    scheduler: PeerId
    server: PeerId
    workers: tuple[PeerId, ...]
    model: Reference
    """Source of the start model."""
    preprocessor: Reference | None = None
    """Source of a preprocessor that this scheduler serves."""
    evaluation: Mapping[PeerId, Reference] = field(default_factory=dict)
    """Each worker's share of the evaluation samples."""
    closed: int = 0
    """Last closed round of an earlier run."""

    def aggregate_spec(self) -> JobSpec:
        """Build the parameter server's spec: updates come from all workers, results go to them and the scheduler."""
        config = AggregateConfig(
            updates=PeersReference(peers=self.workers, strategy=All()),
            results=PeersReference(peers=(*self.workers, self.scheduler), strategy=All()),
            optimizer=outer_optimizer(self.job),
            members=True,
        )
        descriptor = descriptor_of(self.job.resources.parameter_server, AGGREGATE_KIND)
        return JobSpec(job_id=self.job_id, executor=AggregateJob(descriptor=descriptor, config=config))

    def train_spec(self, worker: PeerId | None = None) -> JobSpec:
        """Build a training worker's spec; specs of different workers differ in number and evaluation share only."""
        job = self.job
        batch_size = job.rounds.batch_for(len(self.workers))
        schedule = schedule_spec(job.inner_optimizer, _steps(job, len(self.workers), batch_size))
        config = TrainConfig(
            model=model_spec(job.model, self.model),
            data=SchedulerReference(peer=self.scheduler, dataset=job.dataset.dataset),
            updates=PeersReference(peers=(self.server,), strategy=One()),
            results=PeersReference(peers=(self.server,), strategy=All()),
            optimizer=optimizer_spec(job.inner_optimizer),
            batch_size=batch_size,
            preprocessor=_preprocessor(job, self.preprocessor),
            scheduler=schedule,
            seed=job.seed,
            member=self.workers.index(worker) if worker is not None else None,
            round_steps=None if schedule is None else _round_steps(job, len(self.workers), batch_size),
            evaluation=self._evaluation(worker),
            first_round=self.closed + 1 if self.closed else None,
        )
        descriptor = descriptor_of(job.resources.worker, TRAIN_KIND)
        return JobSpec(job_id=self.job_id, executor=TrainJob(descriptor=descriptor, config=config))

    def _evaluation(self, worker: PeerId | None) -> Evaluation | None:
        share = None if worker is None else self.evaluation.get(worker)
        return None if share is None else Evaluation(data=share, every=self.job.rounds.evaluate_every)


def _preprocessor(job: DilocoJobConfig, artifact: Reference | None) -> Preprocessor | None:
    table = job.preprocessor
    if table is None:
        return None
    if artifact is None:
        artifact = hub_reference(table)
    return Preprocessor(task=job.preprocessor_task, artifact=artifact, input_names=table.input_names)


def evaluation_shares(
    workers: Sequence[PeerId], providers: Sequence[PeerId], dataset: str, slices: int
) -> dict[PeerId, Reference]:
    """Divide the slices of a dataset evenly among workers; with fewer slices than workers some get none."""
    shares: dict[PeerId, Reference] = {}
    for number, worker in enumerate(workers):
        begin, end = number * slices // len(workers), (number + 1) * slices // len(workers)
        if begin < end:
            shares[worker] = PeersReference(
                peers=tuple(providers), strategy=One(), resource=SliceAddress(dataset=dataset, index=begin),
                filenames=tuple(f"evaluation-{index:05}.safetensors" for index in range(begin, end)),
            )  # fmt: skip
    return shares


def _steps(job: DilocoJobConfig, workers: int, batch_size: int) -> int:
    """Return the average number of inner steps of a worker in the whole job."""
    samples = job.rounds.update_rounds * job.rounds.avg_samples_between_updates
    return max(1, samples // (workers * batch_size))


def _round_steps(job: DilocoJobConfig, workers: int, batch_size: int) -> float:
    """Return the average number of inner steps of a worker in a round."""
    return job.rounds.avg_samples_between_updates / (workers * batch_size)
