"""Holders of the outputs of tasks: who holds which, and which are lost or no longer needed. Pure.

An output is at the worker that made it, in a store that outlives the lease, and perhaps in a copy at the scheduler.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredOutput
from hypha_scheduler.strategies.tasks.graph import Key


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
