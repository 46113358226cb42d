"""Brings outputs to the scheduler: those that are kept, and those whose holder drains. A few at a time.

Decides what is fetched next; the runner carries it out.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio.to_thread

from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredOutput
from hypha_proto.whole_directory import remove_tree
from hypha_scheduler.strategies.base import JobContext, RunInBackground
from hypha_scheduler.strategies.tasks.graph import Key
from hypha_scheduler.strategies.tasks.instances import Instance
from hypha_scheduler.strategies.tasks.output_holders import OutputHolders

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

    def may_try_again(self, dataset: str) -> bool:
        """Return whether an output that could not be fetched may be fetched again."""
        return self._tries[dataset] < MAX_TRIES

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
