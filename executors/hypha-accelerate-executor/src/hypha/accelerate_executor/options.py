"""Values of the command line, and what `training` passes to `diloco.loop` and `training_setup`.

The task that a worker passes with `--job` is read by `training` and `predict.settings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.errors import JobError
from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError

_TASK_LIMIT: Final = 1 << 20


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


def parse_task(text: str) -> Any:
    """Parse the task that `--job` has as JSON, or whose file it names as `@path`.

    Raises:
        JobError: there is no such file, or it is not JSON.
    """
    try:
        return parse_json(Path(text[1:]).read_text() if text.startswith("@") else text, _TASK_LIMIT)
    except OSError as error:
        raise JobError(f"--job {text[:200]}: {error.strerror}") from None
    except DecodeError as error:
        raise JobError(f"--job: {error}") from None
