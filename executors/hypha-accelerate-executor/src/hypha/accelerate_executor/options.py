"""Values that `training` passes to `diloco.loop` and `training_setup`: owner options and paths of the model files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OwnerOptions:
    """Options set by the worker's owner with command-line flags."""

    modules: frozenset[str] = field(default_factory=frozenset)
    """Modules whose classes models of task `torch` may use."""
    device_map: str | None = None
    """How transformers distributes the model's layers over devices; None keeps the model on one device."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Paths of the files that the worker has fetched."""

    model: Path
    preprocessor: Path | None = None
