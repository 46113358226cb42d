"""Training that ends with one update: the task for an executor, the data it gets, and the answers to its reports. Pure.

For strategies whose tasks train independently of each other; called by their operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypha_proto.job_spec import (
    All,
    Model,
    One,
    PeersReference,
    SchedulerReference,
    TrainConfig,
)
from hypha_proto.tasks import TaskSpec
from hypha_proto.training_reports import (
    Acknowledged,
    BatchDone,
    Done,
    ReportAnswer,
    ReportError,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    TrainingReport,
)
from hypha_proto.transfer import PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_scheduler.jobs.config import DatasetTable, InnerOptimizerTable
from hypha_scheduler.jobs.specs import optimizer_spec, schedule_spec
from hypha_scheduler.strategies.base import JobContext, PushTarget, SliceToUse


@dataclass(slots=True)
class Training:
    """One attempt to train on a number of samples, after which the executor sends its update here and ends."""

    samples: int
    """Samples to train on."""
    batch_size: int
    target: PushTarget
    """Where the update may be written."""
    deadline: float = math.inf
    """Time at which the operator stops the attempt."""
    loss: float = math.nan
    """Mean over all samples, as the worker has reported it; NaN before."""
    update: str = ""
    """Name of the file of the complete update, or empty; set by the operator, in `Operator.on_push_complete`."""
    _trained: int = 0
    """Samples so far."""
    _slices: int = 0
    """Slices handed out so far."""

    @property
    def is_complete(self) -> bool:
        """Whether there are an update and a finite loss."""
        return bool(self.update) and math.isfinite(self.loss)

    def spec(
        self, context: JobContext, executor: str, model: Model, dataset: DatasetTable, optimizer: InnerOptimizerTable
    ) -> TaskSpec:
        """Return the task: its update goes to this scheduler, and nobody sends outer updates.

        Args:
            context: of the job.
            executor: ``class/name`` of the executor.
            model: the model that it trains.
            dataset: training data of the job.
            optimizer: settings of the job.
        """
        config = TrainConfig(
            model=model,
            data=SchedulerReference(peer=context.scheduler, dataset=dataset.name_in(context.job_id)),
            updates=PeersReference(peers=(context.scheduler,), strategy=One()),
            results=PeersReference(peers=(), strategy=All()),
            optimizer=optimizer_spec(optimizer),
            scheduler=schedule_spec(optimizer, steps=self._batches(self.samples)),
            batch_size=self.batch_size,
        )
        return TaskSpec(executor=executor, training=config)

    def next_slice(self, slices: int) -> SliceToUse:
        """Return the next slice of a dataset that has `slices` of them: in their order, one pass after another."""
        self._slices += 1
        return SliceToUse(*divmod(self._slices - 1, slices))

    def on_training_report(self, report: TrainingReport) -> ReportAnswer:
        """Count the samples and keep the loss; return how many batches are left, or that the executor is done."""
        match report:
            case BatchDone():
                self._trained += report.batch_size
                return ScheduleUpdate(counter=self._batches(max(0, self.samples - self._trained)))
            case SendingUpdate():
                return Acknowledged()
            case RoundMetrics():
                self.loss = report.metrics.get("loss", math.nan)
                return Done()
        return ReportError()

    def on_push_request(self, header: PushHeader) -> PushTarget | Refusal:
        """Return where the update may be written; files of other kinds are refused."""
        if header.kind != PSEUDO_GRADIENT:
            return Refusal(reason=f"this task sends a {PSEUDO_GRADIENT} only")
        return self.target

    def _batches(self, samples: int) -> int:
        return -(-samples // self.batch_size)
