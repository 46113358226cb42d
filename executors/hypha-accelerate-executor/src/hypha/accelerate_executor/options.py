"""What `training` hands on to `loop` and `setup`: the owner's choices, and where the job's files lie. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OwnerOptions:
    """What the worker's owner allows and asks for, by the executor's flags."""

    modules: frozenset[str] = field(default_factory=frozenset)
    """Modules whose classes a model of task `torch` may name."""
    device_map: str | None = None
    """How transformers lays the model's layers over devices; none puts it whole on one."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where what the worker has brought lies."""

    model: Path
    preprocessor: Path | None = None
