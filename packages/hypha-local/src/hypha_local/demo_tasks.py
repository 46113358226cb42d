"""Demo tasks: model, data and hyperparameters of each. Values only; used by `network_layout` and the demos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypha_local.datasets.digits import write_digits
from hypha_local.datasets.text import write_text


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A task that the demo can train. In one round each worker processes `steps` batches on average."""

    name: str
    """Value of the option `--task`; also the dataset's name."""
    arch: str
    """Value of the option `--arch` of `create-model`."""
    type: str
    """Type of the model in the scheduler's TOML."""
    wire: str
    """Type of the model in the executor's commands."""
    write: Callable[[Path, Path], tuple[int, int]]
    """Function that writes the training samples and the held-out samples and returns their numbers."""
    rounds: int
    batch_size: int
    steps: int
    learning_rate: float
    outer_learning_rate: float
    outer_momentum: float
    evaluate_every: int
    """Number of rounds between two evaluations on the held-out samples."""


DIGITS: Final = DemoTask(
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
TEXT: Final = DemoTask(
    name="text",
    arch="llama-bytes",
    type="causal-lm",
    wire="causal-lm",
    write=write_text,
    rounds=16,
    batch_size=8,
    steps=25,
    learning_rate=2e-3,
    # plain averaging: momentum pays off only over more rounds than a demo has
    outer_learning_rate=1.0,
    outer_momentum=0.0,
    evaluate_every=4,  # one evaluation takes seconds on two cores
)
TASKS: Final[Mapping[str, DemoTask]] = {task.name: task for task in (DIGITS, TEXT)}


@dataclass(frozen=True, slots=True)
class DemoInference:
    """A batch inference job that the demo can run."""

    name: str
    """Value of the option `--task`."""
    trained: DemoTask
    """The task that trains its model."""
    kind: str
    """Value of `inference.task` in the scheduler's TOML."""
    dataset: str
    columns: tuple[str, ...]
    """Columns of the dataset that the results repeat."""
    settings: str
    """Further TOML of the table `inference`."""
    batch_size: int
    slices_per_worker: int


CLASSIFY: Final = DemoInference(
    name="inference",
    trained=DIGITS,
    kind="classify",
    dataset="test-images",
    columns=("labels",),
    settings="",
    batch_size=10,
    slices_per_worker=12,  # with three workers 36 slices of 10 images
)
GENERATE: Final = DemoInference(
    name="generate",
    trained=TEXT,
    kind="generate",
    dataset="prompts",
    columns=("source",),
    settings='prompt = "{prompt}"\nmax_new_tokens = 48\ntemperature = 0.7\nstop = ["\\n\\n"]\n',
    batch_size=8,
    slices_per_worker=4,
)
INFERENCE_TASKS: Final[Mapping[str, DemoInference]] = {task.name: task for task in (CLASSIFY, GENERATE)}
