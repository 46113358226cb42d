"""What the demo can train: each task's model, data and numbers. Values only, before `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha_local.datasets.digits import write_digits
from hypha_local.datasets.text import write_text


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to learn. One round is `steps` batches a worker on average."""

    name: str
    """As `--task` takes it; also the dataset's name."""
    arch: str
    """Architecture as `create-model` knows it."""
    type: str
    """The model's type as the scheduler's TOML takes it."""
    wire: str
    """The same as the executor's commands take it."""
    write: Callable[[Path, Path], tuple[int, int]]
    """Writes the samples to train on and those that no worker sees; returns their numbers."""
    rounds: int
    batch_size: int
    steps: int
    learning_rate: float
    outer_learning_rate: float
    outer_momentum: float
    evaluate_every: int
    """Rounds after which the demo has the model measured on the samples that no worker trains on."""


DIGITS: Final = Task(
    name="digits",
    arch="resnet-digits",
    type="vision-classification",
    wire="image-classification",
    write=write_digits,
    rounds=16,
    batch_size=16,
    steps=25,
    learning_rate=2e-3,
    outer_learning_rate=0.9,
    outer_momentum=0.5,
    evaluate_every=1,
)
TEXT: Final = Task(
    name="text",
    arch="llama-bytes",
    type="causal-lm",
    wire="causal-lm",
    write=write_text,
    rounds=16,
    batch_size=8,
    steps=25,
    learning_rate=2e-3,
    # plain averaging: momentum needs more rounds than a demo has to pay for itself
    outer_learning_rate=1.0,
    outer_momentum=0.0,
    evaluate_every=4,  # four times some seconds of two cores
)
TASKS: Final[Mapping[str, Task]] = {task.name: task for task in (DIGITS, TEXT)}
