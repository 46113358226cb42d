"""Answers to workers that ask where a resource of their task is.

Slices of datasets are located here, results by the job's operator, whose answers are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from hypha_net.redaction import redact_urls
from hypha_net.transfer import PullSource
from hypha_proto.datasets import SAFETENSORS, SLICE_SUFFIXES, UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    FailedHolder,
    Gone,
    LocatedFile,
    LocateResource,
    PullFiles,
    ResourceLocation,
)
from hypha_proto.tasks import DatasetSource
from hypha_proto.texts import one_line, quote
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.datasets.providers import MAX_PROVIDERS, Providers
from hypha_scheduler.jobs.artifacts import artifact_dataset
from hypha_scheduler.strategies.base import Effects, JobContext, not_served

Told = TypeVar("Told", LocateResource, UnusableSlice)

MAX_LOCATED_FILES: Final = 4000
"""Files of a resource that one message can name, each with `MAX_PROVIDERS` peers."""
_MAX_NAME: Final = 50
"""Characters of a dataset's name in the names of files; together with the rest they fit into `ids.MAX_PATH` bytes."""


def peer_reason(text: str) -> str:
    """Return what a peer says of itself or of others as events and answers have it: one line of bounded length."""
    return one_line(redact_urls(text), 400)


def gone(reason: str) -> ResourceLocation:
    """Return the answer that there is no such resource, and will be none."""
    return ResourceLocation(gone=Gone(reason=reason))


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """A resource that this scheduler serves: files or contents of the strategy's own, by their path in the resource.

    `location` answers `Operator.on_locate`, and `resolve` answers `Operator.on_pull_request`. A request names a file by
    its place, so both need the same files in the same order. A resource of one file has the path ``""``.
    """

    context: JobContext
    name: str
    """Name under which the job serves them; not that of an artifact."""
    files: Mapping[str, Path | bytes]

    @property
    def dataset(self) -> str:
        """Name of the dataset by which workers ask for them."""
        return artifact_dataset(self.context.job_id, self.name)

    def location(self) -> ResourceLocation:
        """Return that the files are to be pulled from this scheduler."""
        files = tuple(
            LocatedFile(path=path, dataset=self.dataset, index=index, peers=(self.context.scheduler,))
            for index, path in enumerate(self.files)
        )
        return ResourceLocation(pull=PullFiles(files))

    def resolve(self, request: PullRequest) -> PullSource | Refusal:
        """Return the requested file, or a refusal."""
        if request.dataset != self.dataset:
            return not_served(request)
        sources = tuple(self.files.values())
        if request.index >= len(sources):
            return Refusal(reason=f"there are {len(sources)} files, none with index {request.index}")
        return PullSource(sources[request.index])


def with_bounded_failures(told: Told) -> Told:
    """Return a message with as many failures as there are providers, each with one line of reason."""
    failures = tuple(replace(each, reason=peer_reason(each.reason)) for each in told.failures[:MAX_PROVIDERS])
    return replace(told, failures=failures)


def checked_location(told: tuple[ResourceLocation, Effects]) -> tuple[ResourceLocation, Effects]:
    """Return the answer of an operator, with its effects, if it can be sent.

    Raises:
        ValueError: not exactly one of its fields is set, or it names more files than a message can.
    """
    answer, _ = told
    if sum(entry is not None for entry in (answer.pull, answer.pushed, answer.not_yet, answer.gone)) != 1:
        raise ValueError(f"on_locate: exactly one field of the answer must be set: {quote(answer)}")
    files = answer.pull or answer.pushed
    if files is not None and len(files.files) > MAX_LOCATED_FILES:
        raise ValueError(f"on_locate: {len(files.files)} files, a message names at most {MAX_LOCATED_FILES}")
    return told


def locate_slices(
    dataset: DatasetView, providers: Providers, source: DatasetSource, failures: Collection[FailedHolder]
) -> ResourceLocation:
    """Return where slices of a dataset are; data nodes that failed come last, or not at all if they lack a slice."""
    count = len(dataset.slices)
    indices = range(count) if source.slices is None else tuple(dict.fromkeys(source.slices))
    if len(indices) > MAX_LOCATED_FILES:
        return gone(f"a task can fetch {MAX_LOCATED_FILES} slices of a dataset, not {len(indices)}; name fewer")
    if beyond := [index for index in indices if index >= count]:
        return gone(f"dataset {dataset.name!r} has {count} slices, none with index {beyond[0]}")
    lacking = {failure.peer for failure in failures if failure.is_permanent}
    failed = {failure.peer for failure in failures}
    files = []
    for index in indices:
        peers = [peer for peer in providers.order(index) if peer not in lacking]
        if not peers:
            return gone(f"no data node has {dataset.describe(index)} of dataset {dataset.name!r} as announced")
        files.append(_slice_file(dataset, index, tuple(sorted(peers, key=lambda peer: peer in failed))))
    return ResourceLocation(pull=PullFiles(tuple(files)))


def _slice_file(dataset: DatasetView, index: int, peers: tuple[PeerId, ...]) -> LocatedFile:
    entry = dataset.slices[index]
    return LocatedFile(
        path=f"{dataset.name.replace('/', '_')[:_MAX_NAME]}-{index}{SLICE_SUFFIXES[dataset.format or SAFETENSORS]}",
        dataset=dataset.name,
        index=index,
        size=None if entry is None else entry.size,
        digest=None if entry is None else entry.digest,
        peers=peers,
    )
