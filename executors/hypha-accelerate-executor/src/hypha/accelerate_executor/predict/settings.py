"""The inference task as the worker passes it: JSON with settings, paths of resources and the scheduler's peer id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

import msgspec

from hypha.accelerate_executor.data.preprocess import AUTO_CLASSES
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.options import parse_task
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId, is_inside
from hypha_proto.job_spec import PREPROCESSOR_INPUTS
from hypha_proto.prompt_template import columns_of

CLASSIFY: Final = "classify"
GENERATE: Final = "generate"
SLICES: Final = "slices"
"""Name of the resource whose files are the slices."""
SCORES: Final = "scores"
"""Column that asks for the probabilities of all classes."""
CLASSIFIERS: Final = ("image-classification", "sequence-classification", "video-classification",
                      "audio-classification", "torch")  # fmt: skip
"""Model types that classify a row."""
GENERATORS: Final = ("causal-lm",)
"""Model types that generate text."""
RESULT_KEYS: Final[Mapping[str, frozenset[str]]] = {
    CLASSIFY: frozenset({"slice", "row", "error", "label", "score"}),
    GENERATE: frozenset({"slice", "row", "error", "prompt", "text", "tokens", "finish"}),
}
"""Keys of a result by task; columns of the input cannot have these names."""

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A model or preprocessor."""

    type: _Text
    input_names: tuple[_Text, ...] = ()
    path: _Text
    """Its folder, relative to the work directory."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are computed."""

    prompt: str | None = None
    """Template of the prompt of `GENERATE`."""
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 128
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """0 takes the most probable token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    stop: Annotated[tuple[_Stop, ...], msgspec.Meta(max_length=16)] = ()
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 8
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    on_error: Literal["record", "fail"] = "record"
    """Whether the first row that cannot be computed ends the process."""
    chat_template: bool = True
    """Whether the tokenizer's chat template, if it has one, is applied to prompts."""


class InferenceTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute."""

    task: Literal["classify", "generate"]
    model: ModelSource
    preprocessor: ModelSource | None = None
    inference: Sampling = Sampling()
    columns: tuple[_Text, ...] = ()
    """Columns of the results beside the usual ones: columns of the input to copy, and `SCORES` of a classifier."""
    scheduler: str = ""
    """Peer id of the receiver of the results."""

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """Return the columns of the input to copy."""
        return tuple(column for column in self.columns if self.task == GENERATE or column != SCORES)

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Return the columns that the preprocessor of a classifier takes."""
        if self.preprocessor is None or self.task == GENERATE:
            return ()
        return self.preprocessor.input_names or PREPROCESSOR_INPUTS[self.preprocessor.type]


class _Task(msgspec.Struct, frozen=True):
    """What is read of a task."""

    settings: InferenceTask
    scheduler: str


def read_task(text: str) -> InferenceTask:
    """Read the task that `--job` has or names.

    Raises:
        JobError: it is not an inference task that this executor computes.
    """
    try:
        given = msgspec.convert(parse_task(text), _Task)
        task = msgspec.structs.replace(given.settings, scheduler=str(PeerId.parse(given.scheduler)))
    except (msgspec.ValidationError, InvalidIdError) as error:
        raise JobError(f"--job: {error}") from None
    if faults := list(_find_faults(task)):
        raise JobError("--job: " + "; ".join(faults))
    return task


def _find_faults(task: InferenceTask) -> Iterator[str]:
    """Yield what of a task is not supported, with its place, value and remedy."""
    model, preprocessor, prompt = task.model, task.preprocessor, task.inference.prompt
    types = CLASSIFIERS if task.task == CLASSIFY else GENERATORS
    if model.type not in types:
        yield f"settings.model.type: {model.type!r}: task {task.task} takes models of type {', '.join(types)}"
    for place, source in (("model", model), ("preprocessor", preprocessor)):
        if source is not None and not is_inside(source.path):
            yield f"settings.{place}.path: {source.path!r}: expected a path inside the work directory"
    if preprocessor is not None and preprocessor.type not in AUTO_CLASSES:
        yield f"settings.preprocessor.type: {preprocessor.type!r}: expected one of {', '.join(AUTO_CLASSES)}"
    elif preprocessor is not None and not preprocessor.input_names and not PREPROCESSOR_INPUTS[preprocessor.type]:
        kind = preprocessor.type
        yield f"settings.preprocessor.input_names: preprocessor {kind!r} needs the names of its input columns"
    if prompt is None and task.task == GENERATE:
        yield "settings.inference.prompt: generate needs a template such as 'Summarise: {text}'"
    try:
        columns_of(prompt or "")
    except ValueError as error:
        yield f"settings.inference.prompt: {prompt!r}: {error}"
    for taken in sorted(RESULT_KEYS[task.task].intersection(task.columns)):
        yield f"settings.columns: {taken!r}: is a key of the results; rename the column in the dataset"
