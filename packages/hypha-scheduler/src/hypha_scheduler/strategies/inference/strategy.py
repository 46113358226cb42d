"""The strategy ``inference``: a model applied to the rows of a dataset. Registered as an entry point."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_proto.codec import from_json
from hypha_proto.datasets import MANIFEST, Manifest
from hypha_proto.file_digests import digest_file
from hypha_scheduler.audit import prove
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ModelTable
from hypha_scheduler.strategies.base import JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.inference.operator import InferenceData, InferenceOperator
from hypha_scheduler.strategies.inference.parts import PartFiles, PartRecord
from hypha_scheduler.strategies.inference.restore import (
    VERSION,
    RestoredInference,
    describe_artifact,
    differences,
    restore,
)
from hypha_scheduler.strategies.inference.specs import result_columns, task_spec

_SCRATCH: Final = "sources-"
"""Beginning of the name of the directory with copies of model and preprocessor."""


class InferenceStrategy:
    """Implements `strategies.base.Strategy`."""

    job_table = InferenceJobConfig
    rpc_methods: Sequence[StrategyMethod] = ()

    @asynccontextmanager
    async def open(
        self, job: InferenceJobConfig, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[Operator]:
        """Find the dataset, make the model available, and check what an interrupted run has left.

        Raises:
            JobFailedError: the job cannot begin, or the journal is of other data, another model or other settings.
        """
        restored = restore(journal)
        scratch = context.directory / f"{_SCRATCH}{uuid.uuid4().hex[:8]}"
        await anyio.Path(scratch).mkdir()
        try:
            data = await _prepare(job, context, restored, scratch)
            operator = InferenceOperator(job, context, data, restored)
            yield operator
            if operator.is_finished:
                # nothing that is there counts any more
                await anyio.to_thread.run_sync(partial(shutil.rmtree, data.files.incoming, ignore_errors=True))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # also when the job is cancelled, so not in a thread


def _pinned(model: ModelTable, before: Mapping[str, Any] | None) -> ModelTable:
    """Return the model at the commit with which an interrupted run began, if it is of a hub."""
    was = {} if before is None else before.get("model", {})
    if model.repository is None or was.get("repository") != model.repository:
        return model
    return model.model_copy(update={"revision": was["revision"]})


def _remove_stale_sources(directory: Path, scratch: Path) -> None:
    """Remove what earlier runs have copied that were killed."""
    for stale in directory.glob(f"{_SCRATCH}*"):
        if stale != scratch:
            shutil.rmtree(stale, ignore_errors=True)


async def _prepare(
    job: InferenceJobConfig, context: JobContext, restored: RestoredInference, scratch: Path
) -> InferenceData:
    """Find the dataset, copy model and preprocessor to `scratch`, and check what is there; only then change files."""
    manifest = scratch / MANIFEST
    name = str(manifest.relative_to(context.directory))
    dataset = await context.open_dataset(job.dataset, timeout=job.allocation_timeout, manifest=name)
    model = await context.prepare_artifact(_pinned(job.model, restored.identity), "model", scratch / "model")
    preprocessor = None
    if job.preprocessor is not None:
        preprocessor = await context.prepare_artifact(job.preprocessor, "preprocessor", scratch / "preprocessor")
    identity = {
        "version": VERSION,
        "dataset": dataset.name,
        "manifest": await anyio.to_thread.run_sync(digest_file, manifest),
        "slices": len(dataset.samples),
        "model": describe_artifact(model),
        "preprocessor": None if preprocessor is None else describe_artifact(preprocessor),
        "sampling": job.sampling(),
        "columns": list(job.results.columns),
    }
    if restored.identity is not None and (other := differences(restored.identity, identity)):
        raise JobFailedError("\n".join([f"{context.directory}: this is another job than the one to resume:", *other]))
    files = PartFiles(context.directory, [samples or 0 for samples in dataset.samples], job.inference.task)
    parts = list(restored.parts.values())
    if faults := await anyio.to_thread.run_sync(files.verify, parts):
        raise JobFailedError("\n".join([f"{context.directory}: the job's files are not as its journal says:", *faults]))
    await anyio.to_thread.run_sync(files.settle, parts)
    _remove_stale_sources(context.directory, scratch)
    await anyio.Path(manifest).replace(context.directory / MANIFEST)
    return InferenceData(
        dataset=dataset,
        identity=identity,
        spec=task_spec(job, dataset.name, model.reference, None if preprocessor is None else preprocessor.reference),
        files=files,
        largest_slice=await anyio.to_thread.run_sync(_largest_slice, context.directory / MANIFEST),
        finish=partial(_finish, files, f"{dataset.name}-results", result_columns(job, dataset)),
    )


def _largest_slice(manifest: Path) -> int:
    """Return the size in bytes of the largest slice of a dataset."""
    found: Manifest = from_json(Manifest, manifest.read_bytes())  # checked when it was received
    return max((entry.size for entry in found.slices), default=0)


async def _finish(files: PartFiles, dataset: str, columns: Mapping[str, str], parts: Sequence[PartRecord]) -> None:
    """Write the manifest of the results, and audit them.

    Raises:
        JobFailedError: the audit has found something wrong.
    """
    await anyio.to_thread.run_sync(files.write_manifest, dataset, parts, columns)
    await anyio.to_thread.run_sync(prove, files.directory, "results")


STRATEGY: Final = InferenceStrategy()
