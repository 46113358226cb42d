"""The strategy ``diloco``: DiLoCo training (arXiv:2311.08105) with a parameter server. Registered as an entry point."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import anyio

from hypha_proto.datasets import SAFETENSORS
from hypha_proto.round_membership import UPDATE_REFUSED, RefusalKnown
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import DatasetView, JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.operator import DilocoOperator, JobData
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.specs import outer_optimizer


class DilocoStrategy:
    """Implements `strategies.base.Strategy`."""

    job_table = DilocoJobConfig
    rpc_methods: Sequence[StrategyMethod] = (StrategyMethod(UPDATE_REFUSED, unknown_job=RefusalKnown()),)

    def open(
        self, job: DilocoJobConfig, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AbstractAsyncContextManager[Operator]:
        """Find the dataset and make the start model available.

        Raises:
            JobFailedError: the dataset or the model was not found, or the job is to be resumed.
        """
        return _open(job, context, journal)


@asynccontextmanager
async def _open(
    job: DilocoJobConfig, context: JobContext, journal: Sequence[Mapping[str, Any]]
) -> AsyncIterator[Operator]:
    if journal:  # rounds can be restored, but not the model of the last one, nor what its workers begin with
        raise JobFailedError("jobs of this type cannot be resumed yet; submit the job again")
    began = anyio.current_time()
    restored = restore(journal)
    await anyio.Path(context.directory / "updates").mkdir(exist_ok=True)
    yield DilocoOperator(job, context, await _prepare(job, context, restored.closed), restored, began)


async def _prepare(job: DilocoJobConfig, context: JobContext, closed: int) -> JobData:
    timeout = job.resources.allocation_timeout
    dataset = _check_tensors(await context.open_dataset(job.dataset.dataset, timeout=timeout))
    result = ResultModel(context.directory / "model", outer_optimizer(job), job.rounds.checkpoint_every, closed)
    model = await context.prepare_artifact(job.model, "model", result.directory)
    preprocessor = None
    if job.preprocessor is not None:
        preprocessor = await context.prepare_artifact(
            job.preprocessor, "preprocessor", context.directory / "preprocessor"
        )
    evaluation = None
    if job.dataset.evaluation is not None:
        manifest = "evaluation-manifest.json"
        evaluation = _check_tensors(
            await context.open_dataset(job.dataset.evaluation, timeout=timeout, manifest=manifest)
        )
    return JobData(dataset, model.reference, result, preprocessor.reference if preprocessor else None, evaluation)


def _check_tensors(dataset: DatasetView) -> DatasetView:
    """Return the dataset if executors can train on it.

    Raises:
        JobFailedError: its slices are no tensors.
    """
    if dataset.format in (None, SAFETENSORS):
        return dataset
    raise JobFailedError(
        f"dataset {dataset.name!r} holds rows of the format {dataset.format}, and training reads safetensors: convert "
        "its rows to tensors and prepare them with `hypha-data prepare`, or name another dataset"
    )


STRATEGY: Final = DilocoStrategy()
