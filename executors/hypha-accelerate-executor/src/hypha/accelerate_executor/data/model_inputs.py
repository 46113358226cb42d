"""Maps the tensors of a slice to arguments of the model, using the job's input names.

The labels and tokens of a batch are checked before the model uses them, and an error names where a wrong one is stored:
torch's loss reports only the value, on a GPU not even that, and aborts the process there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from hypha.accelerate_executor.data.batches import Batch
from hypha.accelerate_executor.data.samples import Arrays
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.modeling.hf import TORCH

_IMAGE_INPUTS: Final = ("pixel_values", "labels")
_TEXT_INPUTS: Final = ("input_ids", "attention_mask", "labels")
_SELF_LABELLED: Final = frozenset({"causal-lm"})
IGNORED_LABEL: Final = -100
"""The label that transformers' losses ignore, but for those of segmentation, which have one of their own."""
_OWN_IGNORED: Final = ("semantic_loss_ignore_index", "loss_ignore_index")
"""Keys of a segmentation model's config with the label that its loss ignores."""
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def default_inputs(task: str) -> tuple[str, ...]:
    """Return the names of the tensors that a task's model takes if the job names none."""
    return _IMAGE_INPUTS if "image" in task or "segmentation" in task else _TEXT_INPUTS


def text_config(module: torch.nn.Module) -> Any:
    """Return the part of a model's config that is about text; None if the model has no config."""
    config: Any = getattr(module, "config", None)
    is_nested = hasattr(config, "get_text_config") and not config.is_encoder_decoder
    return config.get_text_config(decoder=True) if is_nested else config


def vocabulary_size(module: torch.nn.Module) -> int | None:
    """Return the number of tokens that a model has; None if its config does not say."""
    size = getattr(text_config(module), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


def longest_input(module: torch.nn.Module) -> int | None:
    """Return the largest number of tokens that a model takes; None if its config does not say.

    Models such as RoBERTa number positions from the number of the padding token plus one: these take so many fewer.
    """
    config = text_config(module)
    found = (getattr(config, name, None) for name in _LENGTHS)
    longest = next((value for value in found if type(value) is int and value > 0), None)
    skipped = max((_skipped_positions(name, part) for name, part in module.named_modules()), default=0)
    return None if longest is None else longest - skipped


def _skipped_positions(name: str, part: torch.nn.Module) -> int:
    if not isinstance(part, torch.nn.Embedding) or not name.endswith("position_embeddings"):
        return 0
    return 0 if part.padding_idx is None else part.padding_idx + 1


def takes_argument(module: torch.nn.Module, name: str) -> bool:
    """Return whether a model's `forward` can be called with an argument of this name."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


class ModelInputs:
    """Converts the arrays of a batch to the arguments of a model.

    Attributes:
        shifted: whether a token's label is the next token, so that a row's first label is unused.
        ignored_label: the label that the model's loss ignores.
        columns: name of the tensor in a slice, by argument.
        required: names of the tensors that a slice must have.
    """

    def __init__(
        self,
        task: str,
        input_names: Sequence[str],
        module: torch.nn.Module,
        *,
        labelled: bool = True,
        preprocessed: bool = False,
    ) -> None:
        """Map tensor names of a slice to arguments.

        Args:
            task: wire name of the task.
            input_names: the job's names, in order, of which each is required. A name that is no argument of the model's
                `forward` replaces the usual name at its position. If empty, or the task's default: every tensor named
                as an argument, of which the model's main input is required; of a model of task `torch`, each argument
                without a default.
            module: the model.
            labelled: whether the model gets labels, to compute a loss.
            preprocessed: whether a preprocessor makes tensors, which the model gets whatever names the job gives.

        Raises:
            JobError: an input name stands for no argument of the model.
        """
        every = inspect.signature(module.forward).parameters
        own = {name: each for name, each in every.items() if each.kind not in _VARIADIC}
        self.shifted = task in _SELF_LABELLED
        self.ignored_label = _ignored_label(task, module)
        is_torch = task == TORCH
        usual = tuple(own) if is_torch else _usual_inputs(task, module)
        needed = {name for name, each in own.items() if each.default is inspect.Parameter.empty}
        named = bool(input_names) and not _are_equal(input_names, usual if is_torch else default_inputs(task), labelled)
        self._arguments = {} if named and not preprocessed else {name: name for name in own}
        if named:
            others = every if is_torch else own
            self._arguments |= {_argument(name, place, usual, others): name for place, name in enumerate(input_names)}
        if not labelled and not (is_torch and "labels" in needed):
            self._arguments.pop("labels", None)
        self._labelled = labelled and not is_torch
        chosen = {*input_names} & {*self._arguments.values()}
        self.required = chosen if named else needed if is_torch else {usual[0]}
        if self._labelled:
            self._arguments.setdefault("labels", "labels")
        self.columns: Mapping[str, str] = self._arguments

    def __call__(self, arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments by name, with labels.

        Raises:
            DataError: the slice lacks a tensor that the model needs.
        """
        missing = sorted(self.required - arrays.keys())
        if missing:
            raise DataError(f"a slice lacks the tensor {missing[0]!r}; it has {sorted(arrays)}")
        arguments = {
            argument: torch.from_numpy(arrays[name]).to(device)
            for argument, name in self._arguments.items()
            if name in arrays
        }
        if "labels" not in arguments and self._labelled:
            arguments["labels"] = self._own_labels(arguments, arrays)
        return arguments

    def _own_labels(self, arguments: Mapping[str, torch.Tensor], arrays: Arrays) -> torch.Tensor:
        """Return labels of a text model: the tokens themselves, with padding ignored."""
        if not self.shifted or "input_ids" not in arguments:
            raise DataError(f"a slice lacks the tensor 'labels'; it has {sorted(arrays)}")
        labels = arguments["input_ids"].clone()
        if "attention_mask" in arguments:
            labels[arguments["attention_mask"] == 0] = IGNORED_LABEL
        return labels


def _ignored_label(task: str, module: torch.nn.Module) -> int:
    config = getattr(module, "config", None) if "segmentation" in task else None
    return next((int(getattr(config, key)) for key in _OWN_IGNORED if hasattr(config, key)), IGNORED_LABEL)


def _usual_inputs(task: str, module: torch.nn.Module) -> tuple[str, ...]:
    """Return the arguments of a task's model, its main input first."""
    main = getattr(module, "main_input_name", default_inputs(task)[0])
    return _TEXT_INPUTS if main == _TEXT_INPUTS[0] else (main, "labels")


def _argument(name: str, place: int, usual: Sequence[str], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the argument that an input name stands for, by itself or by its place.

    Raises:
        JobError: there is none.
    """
    if name in parameters or (place >= len(usual) and any(each.kind in _VARIADIC for each in parameters.values())):
        return name
    if place < len(usual) and usual[place] in parameters:
        return usual[place]
    known = ", ".join(parameters)
    raise JobError(
        f"input_names: {name!r} is no argument of the model, which takes {known}; leave it out, or name "
        "that argument's tensor"
    )


def _are_equal(names: Sequence[str], own: Sequence[str], labelled: bool) -> bool:
    """Return whether input names are the defaults; a job without labels may leave them out."""
    return tuple(names) == tuple(own) or (not labelled and [*names] == [name for name in own if name != "labels"])


_CLASSIFICATION: Final = frozenset(
    {"image-classification", "video-classification", "audio-classification", "sequence-classification",
     "token-classification"}
)  # fmt: skip
_LANGUAGE_MODELS: Final = frozenset({"causal-lm", "masked-lm", "seq2-seq-lm"})


def value_limits(task: str, module: torch.nn.Module) -> dict[str, int]:
    """Return, for arguments of the model that are numbers of classes or tokens, how many of them there are.

    Args:
        task: wire name.
        module: the model; its config is read. Models of task ``torch`` state no limits.
    """
    config = getattr(module, "config", None)
    limits: dict[str, int] = {}
    vocabulary = vocabulary_size(module)
    if vocabulary is not None:
        limits["input_ids"] = vocabulary
        if task in _LANGUAGE_MODELS:
            limits["labels"] = vocabulary
    classes, problem = getattr(config, "num_labels", None), getattr(config, "problem_type", None)
    is_single = task in _CLASSIFICATION and problem in (None, "single_label_classification")
    if is_single and isinstance(classes, int) and classes > 1:  # with one it is a regression
        limits["labels"] = classes
    return limits


def check_values(
    arguments: Mapping[str, torch.Tensor], limits: Mapping[str, int], columns: Mapping[str, str], batch: Batch
) -> None:
    """Check that labels and tokens are below their limits.

    Args:
        arguments: the model's arguments, on the CPU, with the rows of `batch`.
        limits: as `value_limits` returns them.
        columns: name of the tensor in a slice, by argument.
        batch: names the row's origin.

    Raises:
        DataError: one is not; the message names dataset, slice, row, column, value and the valid range.
    """
    for name, limit in limits.items():
        values = arguments.get(name)
        if values is None or values.is_floating_point() or not values.numel():
            continue
        if _are_within(values, limit):
            continue
        wrong = (values < 0) | (values >= limit)
        if name == "labels":
            wrong &= values != IGNORED_LABEL
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise DataError(_describe(name, columns.get(name, name), int(values[tuple(place)]), limit, place, batch))


def _are_within(values: torch.Tensor, limit: int) -> bool:
    """Return whether all values are from 0 to below the limit, in one pass: this is asked for every batch."""
    lowest, highest = torch.aminmax(values)
    return int(lowest) >= 0 and int(highest) < limit


def _describe(name: str, column: str, value: int, limit: int, place: list[int], batch: Batch) -> str:
    position = f", position {', '.join(map(str, place[1:]))}" if len(place) > 1 else ""
    ignored = f", or {IGNORED_LABEL} for none" if name == "labels" else ""
    kind = "token" if name == "input_ids" else "label"
    return (
        f"{batch.describe_row(place[0])}, column {column!r}{position}: {value} is not a {kind} of this model, "
        f"which takes 0 to {limit - 1}{ignored}; correct the dataset, or train a model with more {kind}s"
    )
