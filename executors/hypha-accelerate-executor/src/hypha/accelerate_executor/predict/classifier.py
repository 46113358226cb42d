"""Classification of rows: scores of the classes, computed from a model's logits as `transformers.pipeline` does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hypha.accelerate_executor.data.model_inputs import ModelInputs, longest_input, value_limits
from hypha.accelerate_executor.data.preprocess import BatchPreprocessor
from hypha.accelerate_executor.data.samples import Arrays, Samples, join_rows
from hypha.accelerate_executor.errors import DataError, RowError
from hypha.accelerate_executor.predict.computation import Result, Sharing, find_sharing, is_alone_as_together
from hypha.accelerate_executor.predict.settings import SCORES, InferenceTask

logger = logging.getLogger(__name__)

_TOKENS: Final = "input_ids"
_ALWAYS_SOFTMAX: Final = ("audio-classification", "video-classification")
"""Model types whose pipelines make a probability even of a single class, which is 1 then."""


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """A checked row."""

    columns: frozenset[str]
    alike: Hashable
    """What rows that are computed together have in common."""
    arrays: Arrays | None = None
    """Its values as a batch of one row; None where they are read with those of other rows."""


class Classifier:
    """A model with a classification head.

    Attributes:
        rows_at_once: most rows that `compute` takes.
    """

    def __init__(
        self, task: InferenceTask, module: torch.nn.Module, device: torch.device, preprocessor: BatchPreprocessor | None
    ) -> None:
        """Store the model, and find which rows it can compute together.

        Args:
            task: its model's input names and columns are used.
            module: the model, in evaluation mode.
            device: where its inputs go.
            preprocessor: applied to batches first.

        Raises:
            JobError: an input name stands for no argument of the model.
        """
        self.rows_at_once = task.inference.batch_size
        self._kind = task.model.type
        self._module = module
        self._device = device
        self._preprocessor = preprocessor
        processed = preprocessor is not None
        self._inputs = ModelInputs(
            task.model.type, task.model.input_names, module, labelled=False, preprocessed=processed
        )
        self._raw = frozenset(preprocessor.columns if preprocessor else ())
        self._texts = self._raw if preprocessor is not None and preprocessor.is_text else frozenset[str]()
        is_generative = "use_cache" in inspect.signature(module.forward).parameters
        self._fixed = {"use_cache": False} if is_generative else {}
        self._gives_scores = SCORES in task.columns
        self._vocabulary = value_limits(task.model.type, module).get(_TOKENS)
        self._longest = longest_input(module)
        takes_tokens = _TOKENS in self._inputs.columns and preprocessor is None
        self._checks_values = takes_tokens or bool(self._texts)
        self._dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
        self._sharing: Sharing | None = None
        """None until two rows have been compared: those of models that take no text, in their first batch."""
        if preprocessor is not None and self._texts and task.inference.batch_size > 1:
            self._sharing = find_sharing(
                lambda rows: self._logits(preprocessor(join_rows(rows))),
                preprocessor.random_rows(),
                lambda row: len(preprocessor.tokens(row)[0]),
            )

    def prepare(self, rows: Samples, row: int) -> PreparedInput:
        """Return a row's columns, and its values where they have to be checked one by one."""
        present = rows.columns_of(row)
        columns = self._columns_of(frozenset(present))
        if rows.is_uniform and columns <= set(present) and not self._checks_values:
            return PreparedInput(columns, None)
        arrays = rows.arrays([row], columns, self._raw, self._texts)
        tokens = self._check_text(arrays)
        self._check_tokens(arrays)
        shapes = tuple((name, value.shape) for name, value in sorted(arrays.items()) if name not in self._texts)
        return PreparedInput(columns, (shapes, None if self._sharing is Sharing.ANY else tokens), arrays)

    def _columns_of(self, present: frozenset[str]) -> frozenset[str]:
        """Return the columns that the model takes of a row with these."""
        required = frozenset(self._inputs.required)
        if self._preprocessor is not None:
            return self._raw | (required & present)
        return required | (frozenset(self._inputs.columns.values()) & present)

    def compute(
        self, rows: Samples, slice_index: int, prepared: Sequence[tuple[int, PreparedInput]]
    ) -> list[Result | RowError]:
        """Return label, score and, if asked for, all scores of some rows."""
        columns = prepared[0][1].columns
        read = [each.arrays for _, each in prepared if each.arrays is not None]
        if read:
            arrays = join_rows(read)
        else:
            arrays = rows.arrays([number for number, _ in prepared], columns, self._raw, self._texts)
        return self._results(self._shared_logits(self._preprocessor(arrays) if self._preprocessor else arrays))

    def _shared_logits(self, arrays: Arrays) -> torch.Tensor:
        """Return the logits of rows, which are computed one by one where a model does not keep them apart."""

        def some(chosen: Sequence[int]) -> torch.Tensor:
            return self._logits({name: value[list(chosen)] for name, value in arrays.items()})

        logits = None if self._sharing is Sharing.NONE else self._logits(arrays)
        if logits is not None and self._sharing is None:
            finite = logits.isfinite().all(dim=1).nonzero()[:, 0].tolist()
            if len(finite) > 1:
                is_safe = is_alone_as_together(some, (finite[0], finite[-1]))
                self._sharing = Sharing.ANY if is_safe else Sharing.NONE
                logger.info(self._sharing.value)
        if logits is None or self._sharing is Sharing.NONE:
            return torch.cat([some([line]) for line in range(len(next(iter(arrays.values()))))])
        return logits

    def _logits(self, arrays: Arrays) -> torch.Tensor:
        arguments = {
            name: value.to(self._dtype) if value.is_floating_point() else value
            for name, value in self._inputs(arrays, self._device).items()
        }
        with torch.inference_mode():
            output = self._module(**arguments, **self._fixed)
            logits = output if isinstance(output, torch.Tensor) else _logits_of(output)
        samples = len(next(iter(arguments.values())))
        if logits.ndim != 2 or len(logits) != samples or not logits.shape[1]:
            raise DataError(
                f"the model's logits have the shape {list(logits.shape)}; a classifier gives (rows, classes)"
            )
        return logits

    def _results(self, logits: torch.Tensor) -> list[Result | RowError]:
        finite: list[bool] = logits.isfinite().all(dim=1).tolist()
        scores = self._scores(logits.float()).numpy(force=True)
        best = zip(scores.argmax(axis=1).tolist(), scores.max(axis=1).tolist(), strict=True)
        found: list[dict[str, Any]] = [{"label": label, "score": score} for label, score in best]
        if self._gives_scores:
            found = [values | {SCORES: row} for values, row in zip(found, scores.tolist(), strict=True)]
        error = RowError("not-finite", "the model's logits are not finite")
        return [Result(values) if is_finite else error for values, is_finite in zip(found, finite, strict=True)]

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what the problem of the model's config makes of logits."""
        problem = getattr(getattr(self._module, "config", None), "problem_type", None)
        if problem == "regression":
            return logits
        is_binary = logits.shape[1] == 1 and self._kind not in _ALWAYS_SOFTMAX
        if problem == "multi_label_classification" or is_binary:
            return torch.sigmoid(logits)
        return torch.softmax(logits, dim=-1)

    def _check_text(self, arrays: Arrays) -> int | None:
        """Return the number of tokens of text; refuse text without any, and what the model cannot take whole."""
        if self._preprocessor is None or not self._texts:
            return None
        try:
            tokens = self._preprocessor.tokens(arrays)[0]
        except TypeError as error:
            raise RowError("wrong-type", str(error)) from None
        longest = self._preprocessor.longest
        if not tokens:
            raise RowError("wrong-value", "the text has no token")
        if longest is not None and len(tokens) > longest:
            raise RowError("too-long", f"{len(tokens)} tokens; the model takes {longest}")
        if self._vocabulary is not None and max(tokens) >= self._vocabulary:
            raise RowError("wrong-value", f"token {max(tokens)} of the text; the model has {self._vocabulary}")
        return len(tokens)

    def _check_tokens(self, arrays: Arrays) -> None:
        """Refuse tokens that the model does not have: on a GPU they would end the process."""
        column = self._inputs.columns.get(_TOKENS, _TOKENS)
        values = arrays.get(column)
        if values is None or column in self._raw:
            return
        if self._longest is not None and values.ndim == 2 and values.shape[1] > self._longest:
            raise RowError("too-long", f"{values.shape[1]} tokens; the model takes {self._longest}")
        if self._vocabulary is not None and values.size and not 0 <= values.min() <= values.max() < self._vocabulary:
            wrong = int(values.max() if values.max() >= self._vocabulary else values.min())
            raise RowError(
                "wrong-value", f"column {column!r}: {wrong} is no token; they are 0 to {self._vocabulary - 1}"
            )


def _logits_of(output: Any) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise DataError("the model returns no logits; a classifier returns (rows, classes) as a tensor or as 'logits'")
    return logits
