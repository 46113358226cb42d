"""The inference task as the worker passes it: JSON with settings, paths of resources and the scheduler's peer id.

Every fault is reported at once, each with its place, value and remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha.accelerate_executor.data.preprocess import AUTO_CLASSES
from hypha.accelerate_executor.data.template import Template
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.options import parse_task
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PREPROCESSOR_INPUTS

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

_STOP_LIMIT: Final = 16
_STOP_LENGTH: Final = 1000
_MAX_TOKENS: Final = 1_000_000
_MAX_BATCH: Final = 1 << 20
_DEFAULTS: Final[Mapping[str, Any]] = {
    "prompt": None, "max_new_tokens": 128, "temperature": 0.0, "top_p": 1.0, "stop": [], "batch_size": 8, "seed": 0,
    "on_error": "record", "chat_template": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model or preprocessor."""

    type: str
    input_names: tuple[str, ...]
    path: str
    """Its folder, relative to the work directory."""


@dataclass(frozen=True, slots=True)
class InferenceTask:
    """What to compute."""

    task: str
    """`CLASSIFY` or `GENERATE`."""
    model: ModelSource
    preprocessor: ModelSource | None
    columns: tuple[str, ...]
    """Columns of the results beside the usual ones: columns of the input to copy, and `SCORES` of a classifier."""
    scheduler: str
    """Peer id of the receiver of the results."""
    template: Template | None
    max_new_tokens: int
    temperature: float
    """0 takes the most probable token."""
    top_p: float
    stop: tuple[str, ...]
    batch_size: int
    seed: int
    fails: bool
    """Whether the first row that cannot be computed ends the process."""
    chat_template: bool
    """Whether the tokenizer's chat template, if it has one, is applied to prompts."""

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


def read_task(text: str) -> InferenceTask:
    """Read the task that `--job` has or names.

    Raises:
        JobError: it is not an inference task; the message names every fault.
    """
    reader = _Reader()
    task = reader.task(parse_task(text))
    if reader.faults or task is None:
        raise JobError("--job: " + "; ".join(reader.faults))
    return task


class _Reader:
    """Collects faults while reading."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def task(self, plain: Any) -> InferenceTask | None:
        job = self._object(plain, "the task")
        settings = self._object(job.get("settings"), "settings")
        kind: str = settings.get("task", "")
        if type(kind) is not str or kind not in RESULT_KEYS:
            self._fault("settings.task", kind, f"expected one of {', '.join(RESULT_KEYS)}")
            kind = CLASSIFY
        model = self._source(settings.get("model"), "settings.model", None)
        types = CLASSIFIERS if kind == CLASSIFY else GENERATORS
        if model is not None and model.type not in types:
            self._fault("settings.model.type", model.type, f"task {kind} takes models of type {', '.join(types)}")
        preprocessor = None
        if settings.get("preprocessor") is not None:
            preprocessor = self._source(settings["preprocessor"], "settings.preprocessor", tuple(AUTO_CLASSES))
        values = self._inference(settings.get("inference"), kind)
        columns = self._names(settings.get("columns", []), "settings.columns")
        for taken in sorted(RESULT_KEYS[kind].intersection(columns)):
            self._fault("settings.columns", taken, "is a key of the results; rename the column in the dataset")
        scheduler = self._peer(job.get("scheduler"))
        if self.faults or model is None:
            return None
        return InferenceTask(
            task=kind, model=model, preprocessor=preprocessor, columns=columns, scheduler=scheduler, **values
        )

    def _inference(self, plain: Any, kind: str) -> dict[str, Any]:
        given = dict(_DEFAULTS) | {
            key: value for key, value in self._object(plain or {}, "settings.inference").items() if value is not None
        }
        numbers = {
            "max_new_tokens": self._integer(given, "max_new_tokens", 1, _MAX_TOKENS),
            "batch_size": self._integer(given, "batch_size", 1, _MAX_BATCH),
            "seed": self._integer(given, "seed", 0, (1 << 64) - 1),
            "temperature": self._number(given, "temperature", lambda value: 0 <= value <= 100, "0 to 100"),
            "top_p": self._number(given, "top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
        }
        return numbers | {
            "template": self._template(given["prompt"], kind),
            "stop": self._stop(given["stop"]),
            "fails": self._choice(given, "on_error", ("record", "fail")) == "fail",
            "chat_template": self._choice(given, "chat_template", (True, False)),
        }

    def _template(self, prompt: Any, kind: str) -> Template | None:
        place = "settings.inference.prompt"
        if prompt is None:
            if kind == GENERATE:
                self._fault(place, prompt, "generate needs a template such as 'Summarise: {text}'")
            return None
        if type(prompt) is not str:
            self._fault(place, prompt, "expected text")
            return None
        try:
            return Template.parse(prompt)
        except ValueError as error:
            self._fault(place, prompt, str(error))
            return None

    def _stop(self, given: Any) -> tuple[str, ...]:
        stop = self._names([given] if isinstance(given, str) else given, "settings.inference.stop")
        if len(stop) > _STOP_LIMIT or any(len(each) > _STOP_LENGTH for each in stop):
            self._fault("settings.inference.stop", stop, f"at most {_STOP_LIMIT} texts of {_STOP_LENGTH} characters")
        return stop

    def _source(self, plain: Any, place: str, types: tuple[str, ...] | None) -> ModelSource | None:
        found = self._object(plain, place)
        kind, path = found.get("type"), found.get("path")
        if type(kind) is not str or not kind or (types is not None and kind not in types):
            self._fault(f"{place}.type", kind, f"expected {'one of ' + ', '.join(types) if types else 'text'}")
            kind = ""
        if type(path) is not str or not path or Path(path).is_absolute() or ".." in Path(path).parts:
            self._fault(f"{place}.path", path, "expected a path inside the work directory")
            path = ""
        names = self._names(found.get("input_names") or [], f"{place}.input_names")
        if types is not None and kind and not names and not PREPROCESSOR_INPUTS[kind]:
            self._fault(f"{place}.input_names", [], f"preprocessor {kind!r} needs the names of its input columns")
        return ModelSource(kind, names, path) if kind and path else None

    def _object(self, plain: Any, place: str) -> dict[str, Any]:
        if type(plain) is dict:
            return plain
        self._fault(place, plain, "expected an object")
        return {}

    def _names(self, plain: Any, place: str) -> tuple[str, ...]:
        if type(plain) is list and all(type(each) is str and each for each in plain):
            return tuple(dict.fromkeys(plain))
        self._fault(place, plain, "expected a list of texts that are not empty")
        return ()

    def _integer(self, given: Mapping[str, Any], key: str, low: int, high: int) -> int:
        value = given[key]
        if type(value) is int and low <= value <= high:
            return value
        self._fault(f"settings.inference.{key}", value, f"expected an integer from {low} to {high}")
        return low

    def _number(self, given: Mapping[str, Any], key: str, fits: Callable[[float], bool], range_text: str) -> float:
        value = given[key]
        if type(value) in (int, float) and math.isfinite(value) and fits(value):
            return float(value)
        self._fault(f"settings.inference.{key}", value, f"expected a number {range_text}")
        return 1.0

    def _choice(self, given: Mapping[str, Any], key: str, choices: tuple[Any, ...]) -> Any:
        value = given[key]
        if not any(value is choice or (type(value) is str and value == choice) for choice in choices):
            self._fault(f"settings.inference.{key}", value, f"expected one of {', '.join(map(str, choices))}")
        return value

    def _peer(self, plain: Any) -> str:
        try:
            return str(PeerId.parse(plain if type(plain) is str else ""))
        except InvalidIdError:
            self._fault("scheduler", plain, "expected the peer id of the scheduler")
            return ""

    def _fault(self, place: str, value: Any, remedy: str) -> None:
        self.faults.append(f"{place}: {value!r:.100}: {remedy}")
