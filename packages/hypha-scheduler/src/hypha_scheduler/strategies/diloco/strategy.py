"""The strategy ``diloco``: DiLoCo training (arXiv:2311.08105) with a parameter server. Registered as an entry point."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_proto.batch_reports import REPORT_BATCHES, BatchesCounted
from hypha_proto.contributions import AWAIT_COMMIT, STATE_CONTRIBUTION, CommitStatus, ContributionKnown
from hypha_proto.datasets import MANIFEST
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.job_membership import JOIN_ROUND, RoundToJoin
from hypha_proto.replay_plan import ReplayPlan
from hypha_proto.round_membership import UPDATE_REFUSED, RefusalKnown
from hypha_scheduler.audit import prove
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import DatasetView, JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.operator import DilocoOperator
from hypha_scheduler.strategies.diloco.restore import RestoredTraining, restore
from hypha_scheduler.strategies.diloco.result_model import UPDATES, ResultModel
from hypha_scheduler.strategies.diloco.running_job import JobBuilder, TrainingData
from hypha_scheduler.strategies.diloco.specs import outer_optimizer
from hypha_scheduler.strategies.replayable import ReplayOptions

_NO_TASK: Final = "this scheduler runs no such task"


class DilocoStrategy:
    """Implements `strategies.base.Strategy`."""

    job_table = DilocoJobConfig
    rpc_methods: Sequence[StrategyMethod] = (
        StrategyMethod(UPDATE_REFUSED, unknown_job=RefusalKnown()),
        StrategyMethod(STATE_CONTRIBUTION, unknown_job=ContributionKnown(accepted=False, reason=_NO_TASK)),
        StrategyMethod(REPORT_BATCHES, unknown_job=BatchesCounted(counted=0, reason=_NO_TASK)),
        StrategyMethod(AWAIT_COMMIT, unknown_job=CommitStatus(committed=False)),
        StrategyMethod(JOIN_ROUND, unknown_job=RoundToJoin(reason=_NO_TASK), pending=RoundToJoin()),
    )

    @asynccontextmanager
    async def open(
        self, job: DilocoJobConfig, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[Operator]:
        """Find the dataset and make the start model available; go on after the last recorded round of `journal`.

        Raises:
            JobFailedError: the dataset or the model was not found, or is another one than the journal's; or the weights
                after its last round are missing or damaged.
        """
        began = anyio.current_time()
        restored = restore(journal)
        await anyio.Path(context.directory / UPDATES).mkdir(exist_ok=True)
        data = await _prepare(job, context, restored)
        data.result.note_good(restored.losses.good)
        await anyio.to_thread.run_sync(data.result.restore, restored.closed, restored.weights)
        yield DilocoOperator(job, context, data, restored, began)

    def plan_replay(self, directory: Path, records: Sequence[Mapping[str, Any]], options: ReplayOptions) -> ReplayPlan:
        """See `strategies.replayable.Replayable`."""
        from hypha_scheduler.strategies.diloco.replay_plan import plan_replay  # imported late: jobs do not need it

        return plan_replay(directory, records, options)


async def _prepare(job: DilocoJobConfig, context: JobContext, restored: RestoredTraining) -> TrainingData:
    timeout = job.resources.allocation_timeout
    dataset, manifest = await _open_dataset(job, context, restored)
    preprocessor_dir = None if job.preprocessor is None else context.directory / "preprocessor"
    result = ResultModel(
        context.directory,
        outer_optimizer(job),
        keep_updates=job.rounds.keep_updates,
        preprocessor=preprocessor_dir,
        checkpoint_every=job.rounds.checkpoint_every,
        evaluate_every=job.rounds.evaluate_every,
        class_names=(dataset.labels or ()) if job.model.task.endswith("-classification") else (),
    )
    model = await context.prepare_artifact(job.start_model, "model", result.start_dir, unchanged=True)
    preprocessor = None
    if job.preprocessor is not None and preprocessor_dir is not None:
        preprocessor = await context.prepare_artifact(
            job.preprocessor, "preprocessor", preprocessor_dir, unchanged=True
        )
    evaluation = None
    if job.dataset.evaluation is not None:
        evaluation = await context.open_dataset(
            job.dataset.evaluation, timeout=timeout, manifest="evaluation-manifest.json"
        )
    digest = await anyio.to_thread.run_sync(digest_directory, result.start_dir)
    data = TrainingData(
        dataset, model.reference, result, preprocessor.reference if preprocessor else None, evaluation, manifest,
        digest, partial(anyio.to_thread.run_sync, prove, context.directory, "rounds"),
    )  # fmt: skip
    was = restored.began
    if was is not None and (found := was.differences(JobBuilder(job, context, data, restored).began(was.workers))):
        raise JobFailedError(
            f"{context.directory}: the job cannot go on: {'; '.join(found)}. Resume it with what it began with"
        )
    return data


async def _open_dataset(
    job: DilocoJobConfig, context: JobContext, restored: RestoredTraining
) -> tuple[DatasetView, str | None]:
    """Open the training data; return them and the digest of their manifest.

    Raises:
        JobFailedError: they were not found, cannot be used, or have another manifest than in an earlier run.
    """
    name = MANIFEST if restored.began is None else f"new-{MANIFEST}"
    path = context.directory / name
    timeout = job.resources.allocation_timeout
    dataset = await context.open_dataset(job.dataset, timeout=timeout, manifest=name)
    digest = await anyio.to_thread.run_sync(lambda: digest_file(path) if path.exists() else None)
    if restored.began is not None:
        await anyio.Path(path).unlink(missing_ok=True)
        if digest != restored.began.manifest:
            raise JobFailedError(
                f"{context.directory}: the job cannot go on: the manifest of dataset {dataset.name!r} has the digest "
                f"{digest}, and had {restored.began.manifest} when the job began; offer the dataset as it was"
            )
    return dataset, digest


STRATEGY: Final = DilocoStrategy()
