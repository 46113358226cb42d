"""The strategy ``inference``: a model applied to the rows of a dataset. Registered as an entry point."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from hypha_scheduler.jobs.artifacts import Artifact
from hypha_scheduler.jobs.config import ModelTable
from hypha_scheduler.strategies.base import DatasetView, JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.inference.operator import InferenceData, InferenceOperator
from hypha_scheduler.strategies.inference.parts import CommittedPart, PartFiles, raise_faults
from hypha_scheduler.strategies.inference.restore import (
    JobIdentity,
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
            sources = await _open_sources(job, context, scratch, restored.identity)
            data = await _prepare(job, context, sources, restored, scratch)
            operator = InferenceOperator(job, context, data, restored)
            yield operator
            if operator.is_finished:
                await data.files.remove_incoming()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # also when the job is cancelled, so not in a thread


@dataclass(frozen=True, slots=True)
class _Sources:
    dataset: DatasetView
    model: Artifact
    preprocessor: Artifact | None
    identity: JobIdentity


async def _open_sources(
    job: InferenceJobConfig, context: JobContext, scratch: Path, before: Mapping[str, Any] | None
) -> _Sources:
    """Find the dataset, and copy model and preprocessor to `scratch`, from where they are served."""
    manifest = scratch / MANIFEST
    name = str(manifest.relative_to(context.directory))
    dataset = await context.open_dataset(job.dataset, timeout=job.allocation_timeout, manifest=name)
    model = await context.prepare_artifact(_pinned(job.model, before), "model", scratch / "model")
    preprocessor = None
    if job.preprocessor is not None:
        preprocessor = await context.prepare_artifact(job.preprocessor, "preprocessor", scratch / "preprocessor")
    identity = JobIdentity(
        dataset=dataset.name,
        manifest=await anyio.to_thread.run_sync(digest_file, manifest),
        slices=len(dataset.samples),
        model=describe_artifact(model),
        preprocessor=None if preprocessor is None else describe_artifact(preprocessor),
        sampling=job.sampling(),
        columns=job.results.columns,
    )
    return _Sources(dataset, model, preprocessor, identity)


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
    job: InferenceJobConfig, context: JobContext, sources: _Sources, restored: RestoredInference, scratch: Path
) -> InferenceData:
    """Check what is there, and only then change files."""
    files = PartFiles(context.directory, [samples or 0 for samples in sources.dataset.samples], job.inference.task)
    if restored.identity is not None and (other := differences(restored.identity, sources.identity.record())):
        raise JobFailedError("\n".join([f"{context.directory}: this is another job than the one to resume:", *other]))
    parts = list(restored.parts.values())
    raise_faults(context.directory, await anyio.to_thread.run_sync(files.verify, parts))
    await anyio.to_thread.run_sync(files.settle, parts)
    _remove_stale_sources(context.directory, scratch)
    await anyio.Path(scratch / MANIFEST).replace(context.directory / MANIFEST)
    columns = result_columns(job, sources.dataset)
    preprocessor = None if sources.preprocessor is None else sources.preprocessor.reference
    return InferenceData(
        dataset=sources.dataset,
        identity=sources.identity,
        spec=task_spec(job, sources.dataset.name, sources.model.reference, preprocessor),
        files=files,
        largest_slice=await anyio.to_thread.run_sync(_largest_slice, context.directory / MANIFEST),
        finish=partial(_finish, files, f"{sources.dataset.name}-results", columns),
    )


def _largest_slice(manifest: Path) -> int:
    """Return the size in bytes of the largest slice of a dataset."""
    found: Manifest = from_json(Manifest, manifest.read_bytes())  # checked when it was received
    return max((entry.size for entry in found.slices), default=0)


async def _finish(files: PartFiles, dataset: str, columns: Mapping[str, str], parts: Sequence[CommittedPart]) -> None:
    """Write the manifest of the results, and audit them.

    Raises:
        JobFailedError: the audit has found something wrong.
    """
    await anyio.to_thread.run_sync(files.write_manifest, dataset, parts, columns)
    await anyio.to_thread.run_sync(prove, files.directory, "results")


STRATEGY: Final = InferenceStrategy()
