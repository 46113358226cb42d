"""Outputs of tasks: who holds which, which are brought to the scheduler, and where workers get them.

An output is at the worker that made it, in a store that outlives the lease, and perhaps in a copy at the scheduler.
Brought here are those that are kept, and those whose holder drains, a few at a time; the runner carries it out.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio.to_thread

from hypha_net.errors import ContentMismatchError
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    PUSH_OUTPUT,
    AwaitPush,
    LocatedFile,
    PullFiles,
    PushedFile,
    PushOutput,
    ResourceLocation,
)
from hypha_proto.tasks import StoredOutput
from hypha_proto.whole_directory import remove_tree
from hypha_scheduler.strategies.base import JobContext, RunInBackground, SendMessage
from hypha_scheduler.strategies.tasks.graph import Key
from hypha_scheduler.strategies.tasks.instances import Instance

FETCH: Final = "fetch"
"""Beginning of the tags of what is fetched."""
MAX_TRIES: Final = 3
"""Times that an output is fetched before it is lost."""
_AT_A_TIME: Final = 2
_RESULTS: Final = "results"
_COPIES: Final = "copies"
_HUBS: Final = "hubs"
_INCOMING: Final = "incoming"
"""Folder of what is not complete."""


@dataclass(slots=True)
class MadeOutput:
    """An output that exists."""

    output: StoredOutput
    holder: PeerId | None
    """Worker that has it; None if only the copy is left."""
    lease: uuid.UUID | None
    """Lease that it was made on, while that is held."""
    is_suspect: bool = False
    """Whether its holder may have gone: it is tried once more, and then lost."""
    reporters: set[PeerId] = field(default_factory=set)
    """Workers that could not get it from its holder, while the scheduler checks whether it can."""
    copy: Path | None = None
    """Copy at the scheduler, a file or folder."""


@dataclass(slots=True)
class OutputHolders:
    """Outputs that exist."""

    _by_key: dict[Key, MadeOutput] = field(default_factory=dict)
    _by_lease: defaultdict[uuid.UUID, set[Key]] = field(default_factory=lambda: defaultdict(set))
    _copies: dict[str, Key] = field(default_factory=dict)
    """Outputs with a copy, by the name under which their files are pulled."""
    _to_release: defaultdict[PeerId, list[str]] = field(default_factory=lambda: defaultdict(list))
    releasable: tuple[int, int] = (0, 0)
    """Number and bytes of outputs that their holders are to remove and were not asked to."""

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def get(self, key: Key) -> MadeOutput | None:
        """Return an output, or None if it does not exist."""
        return self._by_key.get(key)

    def add(self, key: Key, stored: MadeOutput) -> None:
        """Record an output."""
        self._by_key[key] = stored
        if stored.lease is not None:
            self._by_lease[stored.lease].add(key)

    def remove(self, key: Key) -> MadeOutput | None:
        """Remove an output, and return it."""
        stored = self._by_key.pop(key, None)
        if stored is not None:
            if self._copies.get(stored.output.dataset) == key:
                del self._copies[stored.output.dataset]
            if stored.lease is not None:
                self._by_lease[stored.lease].discard(key)
        return stored

    def of_lease(self, lease: uuid.UUID) -> list[Key]:
        """Return the outputs that were made on a lease."""
        return sorted(self._by_lease.get(lease, ()))

    def suspect(self, lease: uuid.UUID) -> None:
        """Record that a lease is gone, and perhaps the outputs that were made on it."""
        for key in self._by_lease.pop(lease, ()):
            self._by_key[key].is_suspect = True
            self._by_key[key].lease = None

    def add_copy(self, key: Key, path: Path) -> None:
        """Record a copy at the scheduler. It is not served if that of another output is: workers choose the names."""
        stored = self._by_key[key]
        stored.copy = path
        self._copies.setdefault(stored.output.dataset, key)

    def copy_of(self, dataset: str) -> MadeOutput | None:
        """Return the output whose copy is served under a name."""
        key = self._copies.get(dataset)
        return None if key is None else self._by_key.get(key)

    def release(self, holder: PeerId | None, output: StoredOutput) -> None:
        """Have an output removed by its holder."""
        if holder is not None:
            self._to_release[holder].append(output.dataset)
            count, size = self.releasable
            self.releasable = (count + 1, size + output.size)

    def release_all(self) -> None:
        """Have all outputs removed by their holders."""
        for stored in self._by_key.values():
            self.release(stored.holder, stored.output)

    def released(self) -> Iterator[tuple[PeerId, tuple[str, ...]]]:
        """Yield what each holder is to be asked to remove, once."""
        asked, self._to_release = self._to_release, defaultdict(list)
        self.releasable = (0, 0)
        return ((holder, tuple(datasets)) for holder, datasets in asked.items())


# ----------------------------------------------------------------------------------------------------------- collection


@dataclass(slots=True)
class OutputCollection:
    """Outputs that are fetched, or are to be."""

    context: JobContext
    holders: OutputHolders
    _waiting: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    _running: dict[str, tuple[Key, str]] = field(default_factory=dict)
    """Output and the name of its store entry, by tag."""
    _tries: Counter[str] = field(default_factory=Counter)
    """By the name of the store entry."""
    _count: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is fetched."""
        return not self._waiting and not self._running

    def add(self, key: Key, *, first: bool = False) -> None:
        """Have an output fetched, before others if it is `first`."""
        if key in self._waiting or key in (running for running, _ in self._running.values()):
            return
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=not first)

    def start(self, instances: dict[str, Instance]) -> Iterator[RunInBackground]:
        """Yield what is to be fetched now."""
        while self._waiting and len(self._running) < _AT_A_TIME:
            key, _ = self._waiting.popitem(last=False)
            stored = self.holders.get(key)
            if stored is None or stored.holder is None or stored.copy is not None:
                continue
            self._count += 1
            tag = f"{FETCH}:{self._count}"
            self._running[tag] = (key, stored.output.dataset)
            self._tries[stored.output.dataset] += 1
            part = self.context.directory / _INCOMING / str(self._count)
            target = self.path(instances[key[0]], key[1])
            yield RunInBackground(partial(_bring, self.context, stored.output, stored.holder, part, target), tag)

    def end(self, tag: str) -> Key | None:
        """Record that a fetch has ended; return what it was of, or None if that is lost or replaced by now."""
        key, dataset = self._running.pop(tag)
        stored = self.holders.get(key)
        return key if stored is not None and stored.output.dataset == dataset else None

    def may_try_again(self, dataset: str, error: Exception) -> bool:
        """Return whether an output may be fetched again; what is not as its worker reported stays so."""
        return not isinstance(error, ContentMismatchError) and self._tries[dataset] < MAX_TRIES

    def path(self, instance: Instance, output: str) -> Path:
        """Return where the copy of an output is: a folder with an entry for each instance, where there are several."""
        folder = _RESULTS if output in instance.task.keep else _COPIES
        path = self.context.directory / folder / instance.task.name / output
        return path / str(instance.index) if len(instance.task.names) > 1 else path


async def _bring(context: JobContext, output: StoredOutput, holder: PeerId, part: Path, target: Path) -> int:
    """Pull an output to `part`, then move it to `target`; return its size in bytes."""
    size = await context.fetch_output(output, holder, part)
    await anyio.to_thread.run_sync(_replace, part, target)
    return size


def _replace(part: Path, target: Path) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    if not part.exists():  # an empty folder
        part.mkdir()
    remove_tree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, target)


def copies_of_hubs(directory: Path) -> Path:
    """Return the folder of files that this scheduler serves in place of hubs."""
    return directory / _HUBS


def remove_copies(directory: Path) -> None:
    """Remove the copies, of outputs and from hubs, that were only needed while the job ran."""
    remove_tree(directory / _COPIES)
    remove_tree(copies_of_hubs(directory))


def remove_incomplete(directory: Path) -> None:
    """Remove what an earlier run of the job has left incomplete."""
    remove_tree(directory / _INCOMING)


# --------------------------------------------------------------------------------------------------- answers to workers


def answer_to_pull(parts: Sequence[MadeOutput], scheduler: PeerId) -> ResourceLocation:
    """Answer that the parts of a result are to be pulled from their holders, or from the scheduler's copies."""
    files = tuple(
        LocatedFile(
            path=path,
            dataset=part.output.dataset,
            index=index,
            size=part.output.files[index].size,
            digest=part.output.files[index].digest,
            peers=_holders(part, scheduler),
        )
        for part, index, path in _files(parts)
    )
    return ResourceLocation(pull=PullFiles(files=files))


def answer_to_push(
    parts: Sequence[MadeOutput], job: uuid.UUID, delivery: uuid.UUID, to: PeerId, tag: str
) -> tuple[ResourceLocation, tuple[SendMessage, ...]]:
    """Answer that holders push the parts of a result, and tell them to; each part has a holder."""
    files: list[LocatedFile] = []
    asked: defaultdict[PeerId, list[PushedFile]] = defaultdict(list)
    for part, index, path in _files(parts):
        file = part.output.files[index]
        assert part.holder is not None
        asked[part.holder].append(PushedFile(dataset=part.output.dataset, index=index, name=str(len(files))))
        files.append(
            LocatedFile(path=path, dataset=part.output.dataset, index=index, size=file.size, digest=file.digest)
        )
    answer = AwaitPush(delivery=delivery, files=tuple(files), senders=tuple(asked))
    messages = tuple(
        SendMessage(
            holder,
            PUSH_OUTPUT,
            PushOutput(job_id=job, delivery=delivery, to=to, files=tuple(found)),
            f"{tag}:{holder}",
            retry_delays=(0.5,),
            span="push output",
        )
        for holder, found in asked.items()
    )
    return ResourceLocation(pushed=answer), messages


def _files(parts: Sequence[MadeOutput]) -> Iterator[tuple[MadeOutput, int, str]]:
    """Yield part, index and path of each file: the parts of several instances are entries named by their index."""
    for number, part in enumerate(parts):
        for index, file in enumerate(part.output.files):
            folder = (str(number),) if len(parts) > 1 else ()
            yield part, index, "/".join((*folder, *filter(None, (file.path,))))


def _holders(part: MadeOutput, scheduler: PeerId) -> tuple[PeerId, ...]:
    holder = () if part.holder is None else (part.holder,)
    return holder if part.copy is None else (*holder, scheduler)
