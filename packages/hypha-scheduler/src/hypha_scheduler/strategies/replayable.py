"""Interface of strategies whose jobs can be computed again from their journal; see `hypha_scheduler.replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hypha_proto.replay_plan import ReplayPlan


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the owner of a job names beside its directory."""

    data: Path | None = None
    """Folder of the dataset's slices."""
    preprocessor: Path | None = None
    """Folder of the preprocessor, if executors fetched it from a hub."""
    threads: int | None = None
    """Threads to compute with; None keeps what the environment says."""
    tolerance: float = 0.01
    """Largest difference of an outer update that counts as rounding, as a fraction of its largest number."""


@runtime_checkable
class Replayable(Protocol):
    """A strategy whose jobs can be computed again."""

    def plan_replay(self, directory: Path, records: Sequence[Mapping[str, Any]], options: ReplayOptions) -> ReplayPlan:
        """Return what an executor needs to compute a job again; reads files and writes none.

        Raises:
            JobFailedError: the directory is damaged, or a file is not the one that the journal names.
            OSError: a file cannot be read.
        """
        ...
